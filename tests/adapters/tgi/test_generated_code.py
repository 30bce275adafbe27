"""The protocol's wire numbers, and the committed generated code."""

from __future__ import annotations

import re

from pagedkv.adapters.tgi import generate_pb2 as pb

FIELDS = """
HealthRequest, HealthResponse, InfoRequest, ServiceDiscoveryRequest, ClearCacheResponse:
InfoResponse: requires_padding=1:bool dtype=2:string device_type=3:string window_size=4:o uint32 speculate=5:uint32 \
support_chunking=6:bool use_prefix_caching=7:bool attention_impl=8:string block_size=9:uint32
ServiceDiscoveryResponse: urls=1:r string
ClearCacheRequest: id=1:o uint64
Image: data=1:bytes mimetype=2:string
InputChunk: text=1:string image=2:Image
Input: chunks=1:r InputChunk
NextTokenChooserParameters: temperature=1:float top_k=2:uint32 top_p=3:float typical_p=4:float do_sample=5:bool \
seed=6:uint64 repetition_penalty=7:float watermark=8:bool frequency_penalty=9:float grammar=10:string \
grammar_type=11:GrammarType
StoppingCriteriaParameters: max_new_tokens=1:uint32 stop_sequences=2:r string ignore_eos_token=3:bool
Request: id=1:uint64 inputs=2:string truncate=3:uint32 parameters=4:NextTokenChooserParameters \
stopping_parameters=5:StoppingCriteriaParameters prefill_logprobs=6:bool top_n_tokens=7:uint32 input_chunks=8:Input \
blocks=9:r uint32 slots=10:r uint32 adapter_id=11:o string cache_len=12:uint32 add_special_tokens=13:bool \
chunk_len=14:o uint32
Batch: id=1:uint64 requests=2:r Request size=3:uint32 max_tokens=4:uint32 max_blocks=5:uint32
CachedBatch: id=1:uint64 request_ids=2:r uint64 size=3:uint32 max_tokens=4:uint32 current_tokens=5:uint32
GeneratedText: text=1:string generated_tokens=2:uint32 finish_reason=3:FinishReason seed=4:o uint64
Tokens: ids=1:r uint32 logprobs=2:r float texts=3:r string is_special=4:r bool
Generation: request_id=1:uint64 prefill_tokens=2:Tokens tokens=3:Tokens generated_text=4:o GeneratedText \
top_tokens=5:r Tokens
FilterBatchRequest: batch_id=1:uint64 request_ids=2:r uint64
FilterBatchResponse: batch=1:CachedBatch
PrefillRequest: batch=1:Batch cached_batch=2:CachedBatch
PrefillResponse, DecodeResponse: generations=1:r Generation batch=2:o CachedBatch forward_ns=3:uint64 \
decode_ns=4:uint64 total_ns=5:uint64 concat_ns=6:o uint64
DecodeRequest: batches=1:r CachedBatch
WarmupRequest: batch=1:Batch max_input_tokens=2:o uint32 max_prefill_tokens=3:uint32 max_total_tokens=4:o uint32
WarmupResponse: max_supported_total_tokens=1:o uint32 max_input_tokens=2:uint32 max_total_tokens=3:uint32
"""
ENUMS = {
    "GrammarType": {"GRAMMAR_TYPE_NONE": 0, "GRAMMAR_TYPE_JSON": 1, "GRAMMAR_TYPE_REGEX": 2},
    "FinishReason": {"FINISH_REASON_LENGTH": 0, "FINISH_REASON_EOS_TOKEN": 1, "FINISH_REASON_STOP_SEQUENCE": 2},
}
METHODS = ("Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health")


def describe(field):
    kinds = {field.TYPE_BOOL: "bool", field.TYPE_STRING: "string", field.TYPE_UINT32: "uint32"}
    kinds |= {field.TYPE_UINT64: "uint64", field.TYPE_FLOAT: "float", field.TYPE_BYTES: "bytes"}
    kind = kinds.get(field.type) or (field.message_type or field.enum_type).name
    oneof = field.containing_oneof
    is_optional = oneof is not None and oneof.name == f"_{field.name}"
    prefix = "r " if field.is_repeated else "o " if is_optional else ""
    return f"{field.name}={field.number}:{prefix}{kind}"


def test_every_message_has_the_wire_numbers_that_routers_use():
    expected = {}
    for line in FIELDS.strip().splitlines():
        names, fields = line.split(":", 1)
        for name in names.split(", "):
            expected[name] = sorted(re.findall(r"\w+=\d+:(?:[or] )?\w+", fields))
    messages = pb.DESCRIPTOR.message_types_by_name
    assert {name: sorted(map(describe, message.fields)) for name, message in messages.items()} == expected


def test_enums_and_methods():
    enums = pb.DESCRIPTOR.enum_types_by_name
    assert {name: {value.name: value.number for value in enum.values} for name, enum in enums.items()} == ENUMS
    service = pb.DESCRIPTOR.services_by_name["TextGenerationService"]
    assert service.full_name == "generate.v3.TextGenerationService"
    described = {(m.name, m.input_type.name, m.output_type.name) for m in service.methods}
    assert described == {(name, f"{name}Request", f"{name}Response") for name in METHODS}
    assert not any(method.client_streaming or method.server_streaming for method in service.methods)
