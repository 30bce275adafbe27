"""Engines, each run in a separate process by `python -m runners KIND OPTIONS`, with an interpreter that has it.

Other engines' interpreters don't have pagedkv. So only `in_process` and `through_grpc` import it, and imports between
these modules are relative: the package runs from its folder.
"""
