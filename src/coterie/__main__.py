"""``python -m coterie``: the command line."""

from coterie.cli.app import main

if __name__ == "__main__":
    main()
