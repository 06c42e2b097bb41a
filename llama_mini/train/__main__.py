"""python -m llama_mini.train: see loop.py."""

import sys

from .loop import main

if __name__ == "__main__":
    sys.exit(main())
