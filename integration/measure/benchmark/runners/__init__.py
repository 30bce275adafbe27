"""Engines, each run in a process of its own by `python -m runners KIND OPTIONS`, under an interpreter that has it.

Other engines' interpreters don't have pagedkv, so but for `in_process` and `through_grpc` nothing here imports it, and
imports between these modules are relative: the package runs from its folder alone.
"""
