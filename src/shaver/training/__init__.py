"""Training in one call: MAP, L1 and SpaM with schedules, checkpoints, resume and a progress bar."""

from shaver.training.divergence import Diverged
from shaver.training.fitting import fit
from shaver.training.history import History
from shaver.training.lasso import L1Search, search_l1
from shaver.training.options import Options

__all__ = ["Diverged", "History", "L1Search", "Options", "fit", "search_l1"]
