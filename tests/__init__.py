from tests.seeds import OFFSET, shift_seeds

if OFFSET:
    shift_seeds()
