"""`python -m gradient_worker.runner --base-dir DIR`: the runner without anything else in memory."""

import sys

from gradient_worker.runner.main import main

sys.exit(main())
