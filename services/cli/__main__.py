"""`python -m services.cli` is the `quire` command."""

import sys

from services.cli.main import main

sys.exit(main())
