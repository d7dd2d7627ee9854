"""Makes `python -m shortfin_apps.llm.server`, upstream's command, the same as `shortfin-llm serve`."""

import sys

from shortfin_apps.llm.serving.server.command import main

if __name__ == "__main__":
    sys.exit(main())
