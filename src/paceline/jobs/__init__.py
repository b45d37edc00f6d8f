"""Jobs that come with Paceline, and how one is found by its name."""

from paceline.jobs.find import find_job

__all__ = ["find_job"]
