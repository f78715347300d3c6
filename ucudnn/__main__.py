"""`python -m ucudnn`: the command line, for an interpreter whose scripts are not on the path."""

from ucudnn.cli.app import main

if __name__ == "__main__":
    main()
