"""The cpu kernels beside the conformance suite: compiling, caching, instruction sets, threads, reproducibility."""

import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedkv.kernels.cpu import compiler, provider
from pagedkv.kernels.cpu.compiler import CompilerError, build_library, load_library
from pagedkv.kernels.cpu.memory import allocate_zeros
from pagedkv.kernels.cpu.provider import CpuKernels
from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.conformance.attention_oracle import make_rows, store_tokens
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import AttentionKernels
from pagedkv.plugin.kv_dtypes import BF16, INT4, INT8, KVCacheSpec, KVDtype, ScaleGranularity, find_kv_dtype
from pagedkv.plugin.model_spec import AttentionSpec

SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64)
is_x86 = platform.machine() == "x86_64"
CPU_FLAGS = Path("/proc/cpuinfo").read_text().split()


@pytest.fixture
def cpu_kernels() -> CpuKernels:
    return CpuKernels.create(torch.device("cpu"))


def attend(kernels: CpuKernels, seq_lens: list[int], seed: int = 0) -> torch.Tensor:
    """Decodes of sequences, each with keys, values and query drawn from its own length."""
    cache_spec = KVCacheSpec(3, 64, 64, 16, BF16)
    blocks = [-(-seq_len // 16) for seq_len in seq_lens]
    storage = kernels.allocate(cache_spec, sum(blocks))
    block_table = torch.full((len(seq_lens), max(blocks)), -7, dtype=torch.int32)
    queries, first = [], 0
    for row, (seq_len, count) in enumerate(zip(seq_lens, blocks, strict=True)):
        generator = torch.Generator().manual_seed(seed + seq_len)
        for tensor in storage.tensors.values():
            tensor[first : first + count].normal_(generator=generator)
        queries.append(torch.randn(9, 64, generator=generator).bfloat16())
        block_table[row, :count] = torch.arange(first, first + count)
        first += count
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.full((len(seq_lens),), -1),
        max_query_len=1,
        max_seq_len=max(seq_lens),
        num_decodes=len(seq_lens),
    )
    return kernels.attend(torch.stack(queries), storage, metadata, AttentionOptions(scale=0.125))


def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(cpu_kernels: CpuKernels) -> None:
    alone = attend(cpu_kernels, [1700])
    batched = attend(cpu_kernels, [40, 1700, 900, 3])
    assert torch.equal(alone[0], batched[1])


def test_the_number_of_threads_changes_no_bit(cpu_kernels: CpuKernels) -> None:
    before = torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outputs.append(attend(cpu_kernels, [1700, 30]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_threads_are_those_of_torch(cpu_kernels: CpuKernels) -> None:
    """The library finds the OpenMP runtime that torch has loaded: a second one would bring a second pool."""
    attend(cpu_kernels, [40])
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in paths if Path(path).name.startswith("libgomp")]) <= 1


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    kernels = CpuKernels(torch.device("cpu"), ("-DFOR_A_TEST",))
    reasons = kernels.unsupported_reasons(SPEC, SPEC.cache_spec(16, BF16), torch.bfloat16)
    assert len(reasons) == 1
    assert reasons[0].startswith("no C compiler found")


def test_a_failing_compiler_is_a_reason_with_its_words() -> None:
    kernels = CpuKernels(torch.device("cpu"), ("-DLANES=three",))
    reasons = kernels.unsupported_reasons(SPEC, SPEC.cache_spec(16, BF16), torch.bfloat16)
    assert len(reasons) == 1
    assert "failed" in reasons[0]
    assert "error" in reasons[0]


def test_a_library_is_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.c").write_text('__attribute__((visibility("default"))) int pagedkv_attend(void) { return 0; }')
    monkeypatch.setitem(compiler.SOURCES, "attention", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ("-O0", "-DFOR_THE_CACHE_TEST")
    load_library.__wrapped__(flags)
    assert len(list((tmp_path / "cache" / "pagedkv" / "kernels").glob("*.so"))) == 1

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_build", refuse)
    assert load_library.__wrapped__(flags).pagedkv_attend
    with pytest.raises(AssertionError, match="compiled again"):
        load_library.__wrapped__((*flags, "-DANOTHER"))


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler._process_dir.cache_clear()
    found = compiler.cache_dir()
    try:
        assert found.is_dir()
        assert tmp_path not in found.parents
        assert compiler.cache_dir() == found
    finally:
        compiler._process_dir.cache_clear()
        found.rmdir()


@pytest.mark.skipif(not is_x86, reason="compiles for x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads libraries with objdump")
@pytest.mark.parametrize(
    ("flags", "instruction"),
    [
        (("-march=x86-64-v3",), r"vfmadd231ps .*%ymm"),
        (("-march=skylake-avx512",), r"vfmadd231ps .*%zmm"),
        (() if "avx512_bf16" in CPU_FLAGS else ("-march=cooperlake",), r"vdpbf16ps .*%zmm"),
    ],
    ids=["avx2", "avx512", "avx512_bf16"],
)
def test_every_instruction_set_is_used(flags: tuple[str, ...], instruction: str) -> None:
    """In the libraries that the conformance suite runs, where this CPU can."""
    library = build_library(flags)
    listing = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(instruction, listing)) > 20


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs a compiler for ARM")
@pytest.mark.parametrize("instructions", ["armv8-a", "armv8.2-a+bf16"])
@pytest.mark.parametrize("source", sorted(compiler.SOURCE_DIR.rglob("*.c")), ids=lambda path: path.stem)
def test_the_sources_are_c_for_arm_too(source: Path, instructions: str) -> None:
    flags = (*compiler.OPTIMIZATION_FLAGS, "-fopenmp", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-function")
    subprocess.run(["aarch64-linux-gnu-gcc", *flags, f"-march={instructions}", str(source)], check=True)


@pytest.mark.skipif(not is_x86, reason="compiles for x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads libraries with objdump")
@pytest.mark.parametrize(("flags", "vector"), [(("-march=x86-64-v3",), "ymm"), (("-march=skylake-avx512",), "zmm")])
def test_bytes_are_widened_by_one_instruction_a_vector(flags: tuple[str, ...], vector: str) -> None:
    """Left to the compiler, byte by byte, scales of int4 took more time than all else of a decode."""
    listing = subprocess.run(["objdump", "-d", build_library(flags)], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"vpmovsxbd .*%{vector}", listing)
    assert re.search(rf"vpmovzxbd .*%{vector}", listing)
    assert "vpinsrb" not in listing


def test_what_the_kernels_cannot_do_is_a_reason(cpu_kernels: CpuKernels) -> None:
    def reasons(spec: AttentionSpec, block_size: int = 16, dtype: torch.dtype = torch.float32) -> str:
        return "; ".join(cpu_kernels.unsupported_reasons(spec, spec.cache_spec(block_size, BF16), dtype))

    assert not reasons(SPEC)
    assert "head size 36" in reasons(AttentionSpec(4, 4, 36, 64))
    assert "no multiple of 3 KV heads" in reasons(AttentionSpec(4, 3, 64, 64))
    assert "block size 24" in reasons(SPEC, block_size=24)
    assert "float64" in reasons(SPEC, dtype=torch.float64)
    for unknown in (replace(INT4, group_size=32), replace(INT8, scale_dtype=torch.float16), replace(INT8, bits=4)):
        assert (
            "is not implemented" in cpu_kernels.unsupported_reasons(SPEC, SPEC.cache_spec(16, unknown), BF16.storage)[0]
        )
    on_gpu = CpuKernels.create(torch.device("cuda"))
    assert "device is cuda" in on_gpu.unsupported_reasons(SPEC, SPEC.cache_spec(16, BF16), torch.float32)[0]


def test_compiler_errors_come_out_of_a_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CompilerError("no C compiler found")

    monkeypatch.setattr(provider, "load_library", fail)
    with pytest.raises(CompilerError, match="no C compiler"):
        attend(CpuKernels.create(torch.device("cpu")), [5])


def test_memory_of_blocks_is_zero_aligned_and_writable() -> None:
    tensor = allocate_zeros((5, 1024, 1024), torch.bfloat16)
    assert not tensor.any()
    assert tensor.data_ptr() % (2 * 2**20) == 0
    tensor.fill_(1)
    assert tensor.float().mean() == 1


def test_memory_that_the_system_lacks_is_an_out_of_memory_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="does not map"):
        allocate_zeros((2**50,), torch.float32)


QUANTIZED = ("int8", "int8_static", "fp8_e4m3", "fp8_e4m3_static", "fp8_e5m2", "fp8_e5m2_static", "int4")


def prefill_metadata(num_tokens: int) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.arange(num_tokens // 16 + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(num_tokens),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_decodes=0,
    )


def store_and_read(
    kernels: AttentionKernels, kv_dtype: KVDtype, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read of k: [num_tokens, 3, 64] and v: [num_tokens, 3, 80] after storing them."""
    storage = kernels.allocate(KVCacheSpec(3, 64, 80, 16, kv_dtype), k.shape[0] // 16 + 1)
    scales = (torch.tensor([0.01, 0.02, 0.03]), torch.tensor([0.03, 0.02, 0.01]))
    storage = replace(storage, static_scales=scales if kv_dtype.has_static_scales else None)
    kernels.store(storage, k, v, prefill_metadata(k.shape[0]))
    return kernels.read(storage, torch.arange(k.shape[0]))


def is_equal(kv_dtype: KVDtype, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where numbers are the same; but for the order of sums, where they are rotated back."""
    tolerance = 1e-5 if kv_dtype.has_rotated_values else 0.0
    return torch.isclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_elements_and_scales_are_those_of_the_reference(cpu_kernels: CpuKernels, name: str, dtype: torch.dtype) -> None:
    """Also those of rows of zeros, of numbers that overflow, and of NaN and Inf."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-6, 3, 200)[:, None, None]
    k = (torch.randn(200, 3, 64, generator=generator) * magnitudes).to(dtype)
    v = torch.randn(200, 3, 80, generator=generator).to(dtype)
    k[5], k[6, 0, 3], k[7, 1, 2], k[8, 2, 1] = 0, float("nan"), float("inf"), float("-inf")
    reference = ReferenceKernels.create(torch.device("cpu"))
    kv_dtype = find_kv_dtype(name)
    for ours, theirs in zip(
        store_and_read(cpu_kernels, kv_dtype, k, v), store_and_read(reference, kv_dtype, k, v), strict=True
    ):
        # But for int8, scales are chosen by sums of squares, which may be a tie but for the order of the sum.
        is_same = is_equal(kv_dtype, ours, theirs).all(-1)
        assert is_same.float().mean() > (0.9999 if kv_dtype.storage is torch.int8 else 0.99)
        assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_stored_nan_is_no_number_in_the_result(cpu_kernels: CpuKernels, name: str) -> None:
    """Of a decode, which reads elements in place, and of a prompt, which copies them first."""
    for kv_dtype in (find_kv_dtype(name), find_kv_dtype(f"{name}_static")):
        generator = torch.Generator().manual_seed(0)
        k, v = torch.randn(2, 40, 3, 64, generator=generator)
        v[3, 1, 5] = float("nan")
        storage = cpu_kernels.allocate(KVCacheSpec(3, 64, 64, 16, kv_dtype), 3)
        ones = torch.ones(3)
        storage = replace(storage, static_scales=(ones, ones) if kv_dtype.has_static_scales else None)
        metadata = prefill_metadata(40)
        cpu_kernels.store(storage, k, v, metadata)
        decode = replace(metadata, cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_query_len=1, num_decodes=1)
        q = torch.randn(40, 9, 64, generator=generator).bfloat16()
        for out in (
            cpu_kernels.attend(q, storage, metadata, AttentionOptions(scale=0.125))[-1],
            cpu_kernels.attend(q[:1], storage, decode, AttentionOptions(scale=0.125))[0],
        ):
            # An integer holds no NaN: under a scale from outside it is stored as 0, as in the reference.
            assert out[3:6, 5].isnan().all() == (kv_dtype.name != "int8_static")
            assert out[:3].isfinite().all()
            assert out[6:].isfinite().all()


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("flags", [(), ("-march=x86-64",)], ids=["native", "portable"])
def test_int4_blocks_that_grow_are_those_of_the_reference(flags: tuple[str, ...], block_size: int) -> None:
    """Channels of very different sizes, in steps that end anywhere in a block, also beyond what can be stored."""
    generator = torch.Generator().manual_seed(0)
    rows = make_rows([(37, 1), (0, 70), (5, 40), (16, 1), (0, 3)], block_size, 40, generator)
    num_tokens = sum(row.seq_len for row in rows)
    k = torch.randn(num_tokens, 3, 64, generator=generator) * torch.logspace(-3, 2, 64)
    v = torch.randn(num_tokens, 3, 80, generator=generator)
    k[3], k[5], k[8, 0, 3], v[9, 1, 2] = k[3] * 1e6, 0, float("nan"), float("inf")
    slots = torch.cat([row.slots(block_size) for row in rows])
    read = []
    device = torch.device("cpu")
    for kernels in (CpuKernels(device, flags if is_x86 else ()), ReferenceKernels.create(device)):
        storage = kernels.allocate(KVCacheSpec(3, 64, 80, block_size, INT4), 40)
        store_tokens(kernels, storage, rows, k, v)
        read.append(kernels.read(storage, slots))
    for ours, theirs in zip(*read, strict=True):
        # Scales are chosen by sums of squares, which may be a tie but for the order of the sum.
        assert is_equal(INT4, ours, theirs).all(-1).float().mean() > 0.99


def test_keys_and_values_may_have_different_scales(cpu_kernels: CpuKernels) -> None:
    mixed = replace(INT8, name="int8_static_keys", key_scales=ScaleGranularity.STATIC)
    assert cpu_kernels.unsupported_reasons(SPEC, SPEC.cache_spec(16, mixed), torch.bfloat16) == []
    storage = cpu_kernels.allocate(SPEC.cache_spec(16, mixed), 1)
    assert set(storage.tensors) == {"k", "v", "v_scale"}
    k = torch.linspace(-1, 1, 64).expand(1, 3, 64).contiguous()
    storage = replace(storage, static_scales=(torch.tensor([0.5, 0.25, 0.125]), torch.ones(3)))
    cpu_kernels.store(storage, k, k, prefill_metadata(1))
    keys, values = cpu_kernels.read(storage, torch.tensor([0]))
    assert keys[0, :, -1].tolist() == [1.0, 1.0, 1.0]
    assert keys[0, 0].unique().tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    torch.testing.assert_close(values, k, atol=0.5 / 127 + 1e-6, rtol=0)


def test_missing_static_scales_are_a_fault_of_the_caller(cpu_kernels: CpuKernels) -> None:
    k = torch.zeros(1, 3, 64)
    storage = cpu_kernels.allocate(SPEC.cache_spec(16, find_kv_dtype("int8_static")), 1)
    with pytest.raises(ConfigError, match="needs static scales"):
        cpu_kernels.store(storage, k, k, prefill_metadata(1))
