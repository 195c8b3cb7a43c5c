import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # problems.py, for these tests and the processes they start
