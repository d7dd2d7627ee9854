"""`python -m shortfin_apps.llm` is `shortfin-llm`."""

import sys

from shortfin_apps.llm.cli import main

sys.exit(main())
