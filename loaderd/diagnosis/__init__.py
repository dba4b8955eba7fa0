"""Why a training is as fast as it is: :func:`diagnose`, a pure function of two snapshots."""

from loaderd.diagnosis.diagnose import COPY_TO_DEVICE, Diagnosis, diagnose, diagnose_samples, nothing_yet
from loaderd.diagnosis.rates import Rates, rates
from loaderd.diagnosis.remedies import Verdict

__all__ = ["COPY_TO_DEVICE", "Diagnosis", "Rates", "Verdict", "diagnose", "diagnose_samples", "nothing_yet", "rates"]
