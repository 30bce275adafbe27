"""Translates the command-line flags of text-generation-inference's launcher into keys of the config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class LogLevel(str, Enum):
    """The names of log levels of the launcher's filter and of the stock server."""

    TRACE = "TRACE"
    DEBUG = "DEBUG"
    INFO = "INFO"
    SUCCESS = "SUCCESS"
    WARN = "WARN"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"
    OFF = "OFF"

    @property
    def python_name(self) -> str:
        """The nearest level of Python's logging."""
        return _PYTHON_NAMES.get(self, self.value)


_PYTHON_NAMES = {
    LogLevel.TRACE: "DEBUG",
    LogLevel.SUCCESS: "INFO",
    LogLevel.WARN: "WARNING",
    LogLevel.OFF: "CRITICAL",
}


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The command-line flags of one shard. None or "" is a flag that the launcher left out."""

    model_id: str
    uds_path: str
    sharded: bool = False
    quantize: str | None = None
    speculate: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    otlp_endpoint: str | None = None
    otlp_service_name: str | None = None
    max_input_tokens: int | None = None

    def refused(self) -> list[str]:
        """Lists the flags that are not supported, each with what to do instead."""
        reasons = []
        if self.quantize is not None:
            reasons.append(
                f"--quantize {self.quantize}: quantized weights can't be served; serve a checkpoint without "
                '"quantization_config" in its config.json (the launcher passes the flag for one that has it), leave '
                "the flag out, and set cache.kv_dtype to make the cache smaller"
            )
        if self.speculate:
            reasons.append(f"--speculate {self.speculate}: there is no speculative decoding here; leave the flag out")
        return reasons

    def overrides(self) -> dict[str, Any]:
        """Returns the config keys that the flags set."""
        from pagedkv.plugin.kv_dtypes import TGI_NAMES

        keys = {
            "model.path": self.model_id,
            "server.uds_path": self.uds_path,
            "model.dtype": self.dtype,
            "cache.kv_dtype": TGI_NAMES.get(self.kv_cache_dtype or "", self.kv_cache_dtype),
            "model.revision": self.revision,
            "model.trust_remote_code": self.trust_remote_code or None,
            "tracing.otlp_endpoint": self.otlp_endpoint,
            "tracing.service_name": self.otlp_service_name,
            "limits.max_input_tokens": self.max_input_tokens,
        }
        return {key: value for key, value in keys.items() if value is not None}
