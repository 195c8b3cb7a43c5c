"""Networks in files: masked, compact, trained runs and hub folders. Written atomically, never unpickled."""

from shaver.files.card import Card
from shaver.files.hub import pull, push, write_folder
from shaver.files.saved import load_masks, save
from shaver.files.trained import TrainedNetwork, load, load_trained

__all__ = ["Card", "TrainedNetwork", "load", "load_masks", "load_trained", "pull", "push", "save", "write_folder"]
