from rollmill.cli import main

main()
