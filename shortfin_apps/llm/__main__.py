"""Makes `python -m shortfin_apps.llm` the same command as `shortfin-llm`."""

import sys

from shortfin_apps.llm.cli import main

sys.exit(main())
