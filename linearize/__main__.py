"""`python -m linearize` is the command line."""

from linearize.cli import main

if __name__ == "__main__":
    main()
