"""`python -m llamaspec`: the same as the `llamaspec` command."""

from llamaspec.cli.main import main

if __name__ == "__main__":
    main()
