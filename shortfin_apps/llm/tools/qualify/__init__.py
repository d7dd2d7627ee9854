"""`shortfin-llm qualify`: tests a device on which this package has never run, and writes a report.

outcome.py      the outcome of a check, and the faults that it can name
check.py        a check
checks.py       the list of all checks, in the order in which they run
facts.py        the machine: chip, driver, firmware, clocks, memory, versions
bench.py        what checks work on: artefacts, a loaded model, a server; each is made when first needed
diagnosis.py    tells faults of the device apart by running the self-test again
results.py      checks of results: entries, queued invocations, uploads, weights, tokens
answers.py      checks of a server's answers: receipts under preemption, fault drills, soak
speeds.py       checks of speed: probes, roofline, workloads
worker.py       the process that runs the checks
run.py          starts workers, and ends those that hang
report.py       the results as JSON, without names of people and machines
page.py         the same as a page
"""
