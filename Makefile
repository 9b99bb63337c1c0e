# The commands people type; `make` lists them. ARGS go to pytest: make test ARGS="tests/core -x"
.DEFAULT_GOAL := help
.PHONY: help setup test quick check quickstart

help: ## list these commands
	@sed -nE 's/^([a-z]+): ## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: ## make .venv with everything that tests and checks need
	@bash -euc '. scripts/venv.sh && make_venv local,quant,dev,plugins'

test: ## run every test, or those of ARGS
	scripts/test $(ARGS)

quick: ## run the tests of what changed
	scripts/test --quick $(ARGS)

check: ## lint, format, types, line budget
	scripts/check

quickstart: ## convert, build and serve the tiny models, and stream one answer
	scripts/quickstart
