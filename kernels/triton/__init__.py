"""Paged attention for GPUs, written in Triton: NVIDIA from sm_80 on, AMD from gfx942 on."""
