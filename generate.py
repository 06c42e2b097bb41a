"""Continue a prompt with a Llama-style checkpoint: python generate.py --prompt "Once upon a time".

The same as `python -m llama_mini`, and as `llama-mini` where the package is installed: its options and
what they do are in llama_mini/__main__.py, which a wheel has as well.
"""

import sys

from llama_mini.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
