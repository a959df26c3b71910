"""`python -m gradient_worker` is `gradient-worker`."""

from gradient_worker.cli import main

if __name__ == "__main__":
    main()
