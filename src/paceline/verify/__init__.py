"""The proof: a job under a plan, under one worker, and in a plain PyTorch loop, compared step by step and tensor by tensor."""

from paceline.verify.compare import Comparison, Difference, compare
from paceline.verify.proof import PlainCheck, Verdict, verify
from paceline.verify.records import StepRecord, record

__all__ = ["Comparison", "Difference", "PlainCheck", "StepRecord", "Verdict", "compare", "record", "verify"]
