"""The parts of `scripts/bench.py`.

    plan.py         what is run: engines, workloads, and what the processes say to each other
    machine.py      where it is run: cores, environment, hardware facts
    arguments.py    options that bench_kernels.py and bench_draft_step.py share
    pool.py         engines as long-lived subprocesses, started and stopped as needed
    worker.py       one such subprocess: a vLLM engine, stepped by hand
    session.py      the methods take turns on each workload
    measurement.py  time stamps and counters made into rates and latencies
    prediction.py   what theory expects of a measurement, from its parts
    report.py       measurements made into rows: table, JSON, plot

None imports vLLM but the worker; of the project only the worker and `prediction.py` import anything.
"""
