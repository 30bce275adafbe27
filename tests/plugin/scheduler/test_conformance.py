"""The scheduler `continuous` run through the suite for every scheduler."""

from pagedkv.plugin.conformance.scheduler import SchedulerConformance


class TestContinuousScheduler(SchedulerConformance):
    scheduler_name = "continuous"
