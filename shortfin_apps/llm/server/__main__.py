"""`python -m shortfin_apps.llm.server`, the same as `shortfin-llm serve`."""

import sys

from shortfin_apps.llm.server.command import main

sys.exit(main())
