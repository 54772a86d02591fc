"""``python -m jaxrl_llm`` is ``python -m jaxrl_llm.main``."""

import sys

from jaxrl_llm.main import main

if __name__ == "__main__":
    sys.exit(main())
