"""What a server's figures, or a trace, say about its options: pure checks."""

from dynaexq.doctor.baseline import Baseline, Change
from dynaexq.doctor.checks import CHECKS, Check, Finding, examine
from dynaexq.doctor.figures import Figures, Subject, Unit
from dynaexq.doctor.verdicts import Status, Verdict

__all__ = [
    "CHECKS",
    "Baseline",
    "Change",
    "Check",
    "Figures",
    "Finding",
    "Status",
    "Subject",
    "Unit",
    "Verdict",
    "examine",
]
