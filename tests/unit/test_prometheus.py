"""Prometheus metrics: what is written, what a scrape reads, and what the documents say of them."""

import gc
import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from vllm_ssd.metrics import Histogram, Totals
from vllm_ssd.prometheus import METRICS, PREFIX, Exporter

from .scripted import VOCABULARY
from .test_engine import PROMPT, make
from .test_engine import K as TREE_DEPTH
from .test_proposer import PROMPT as GAME_PROMPT
from .test_proposer import Game

DOCS = Path(__file__).parents[2] / "docs"
POSITIONS = 4


class Source:
    """Figures that a test sets."""

    def __init__(self) -> None:
        self.totals = Totals(rounds=7, hits=3, misses=2, fallback_ngram=2, draft_kv_usage=0.25)
        self.up = True

    def stats(self) -> dict[str, float]:
        return {**self.totals.as_dict(), "draft_up": self.up, "draft_restarts": 1}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all the time."""
    monkeypatch.setattr("vllm_ssd.prometheus._SECONDS", 0.01)


def exporter(path: Path, model_name: str = "model") -> Exporter:
    return Exporter(str(path), model_name, 0, POSITIONS)


def scrape(path: Path) -> dict[str, float]:
    """Sample → value, by vLLM's multiprocess way of serving a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(path))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("engine") == "0"
            sample.labels.pop("model_name")
            found[sample.name.removeprefix(PREFIX) + "".join(f" {v}" for v in sample.labels.values())] = sample.value
    return found


def soon(condition) -> bool:
    """Whether `condition` comes true within five seconds."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# ---- writing and reading ----


def test_every_metric_is_there_from_the_start(tmp_path: Path) -> None:
    """A dashboard of a server without traffic shows nothing."""
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    found = {metric.name: metric for metric in registry.collect()}
    assert set(found) == {PREFIX + metric.name for metric in METRICS}
    for metric in METRICS:
        family = found[PREFIX + metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert all(sample.labels["model_name"] == "model" for sample in family.samples)
    values = scrape(tmp_path)
    assert values["rounds_total"] == 7 and values["hits_total"] == 3
    assert values["fallbacks_total ngram"] == 2 and values["fallbacks_total draft"] == 0
    assert values["draft_up"] == 1 and values["draft_kv_cache_usage_perc"] == 0.25
    assert [f"hits_per_pos_total {i}" in values for i in range(POSITIONS + 1)] == [True] * POSITIONS + [False]
    writer.close()


def test_values_follow(tmp_path: Path, quick: None) -> None:
    """What is scraped is what was true at the start."""
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    source.totals.hits += 39
    source.totals.observe_lookup(2, found=3, wanted=3)
    source.totals.observe_tree([0.004, 0.004, 9.0], cancelled=5)
    source.up = False
    assert soon(lambda: scrape(tmp_path)["draft_up"] == 0)
    values = scrape(tmp_path)
    assert values["hits_total"] == 43 and values["branches_cancelled_total"] == 5
    assert (values["lookups_per_pos_total 2"], values["hits_per_pos_total 2"]) == (1, 1)
    assert values["tree_step_seconds_count"] == 3 and values["tree_step_seconds_sum"] == pytest.approx(9.008)
    assert values["tree_step_seconds_bucket 0.003"] == 0
    assert values["tree_step_seconds_bucket 0.005"] == values["tree_step_seconds_bucket 0.25"] == 2
    assert values["tree_step_seconds_bucket +Inf"] == 3
    writer.close()


def test_the_last_figures_are_written_at_the_end(tmp_path: Path) -> None:
    """Totals end before the last requests; or a closed engine still says that its draft is up."""
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    source.totals.hits = 99
    writer.close()
    values = scrape(tmp_path)
    assert values["hits_total"] == 99
    assert "draft_up" not in values


def test_an_engine_that_is_dropped_is_not_kept_alive(tmp_path: Path, quick: None) -> None:
    """The writing thread holds the engine, and with it the draft process."""
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    thread = writer._thread
    del source
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert "draft_up" not in scrape(tmp_path) and scrape(tmp_path)["hits_total"] == 3


def test_engines_share_a_folder(tmp_path: Path) -> None:
    """A second engine overwrites the first, or its totals are lost when it ends."""
    first, second = Source(), Source()
    writers = [exporter(tmp_path), exporter(tmp_path)]
    writers[0].start(first)
    writers[0].close()
    writers[1].start(second)
    assert scrape(tmp_path)["rounds_total"] == 14
    assert scrape(tmp_path)["draft_up"] == 1
    writers[1].close()


def test_figures_that_fail_do_not_end_the_engine(tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    """An error in the thread is raised nowhere, and nobody hears of it."""
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    source.totals = None
    assert soon(lambda: not writer._thread.is_alive())
    writer.close()
    assert "no longer brought up to date" in caplog.text


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """The drafter relies on an OSError."""
    with pytest.raises(OSError):
        exporter(tmp_path / "nowhere")


def test_leftovers_are_the_files_and_the_folder(tmp_path: Path) -> None:
    """A draft that outlives its killed target removes too little."""
    writer = exporter(tmp_path)
    assert sorted(writer.leftovers) == sorted([str(tmp_path), *map(str, tmp_path.iterdir())])


def test_writing_is_cheap(tmp_path: Path) -> None:
    """It takes so long that the target feels it: once a second, a millisecond would be 0.1 %."""
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    writer.close()
    writer = exporter(tmp_path)
    writer.start(source)
    began = time.thread_time()
    for _ in range(20):
        writer._write()
    assert (time.thread_time() - began) / 20 < 0.005
    writer.close()


# ---- vLLM's side ----


def test_vllm_serves_a_folder_of_its_own_or_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are in a folder that vLLM does not serve, or are unregistered by vLLM."""
    prometheus = pytest.importorskip("vllm.v1.metrics.prometheus")
    reader = pytest.importorskip("vllm.v1.metrics.reader")
    from vllm_ssd.integration import metrics_endpoint

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert metrics_endpoint.metrics_directory() == str(tmp_path)
    source = Source()
    writer = exporter(tmp_path)
    writer.start(source)
    assert b"vllm:saguaro_rounds_total" in generate_latest(prometheus.get_prometheus_registry())
    writer.close()

    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    directory = metrics_endpoint.metrics_directory()
    assert directory == metrics_endpoint.metrics_directory() != str(tmp_path)
    writer = exporter(Path(directory), "ours")
    writer.start(source)
    prometheus.unregister_vllm_metrics()  # as vLLM does when an engine starts
    assert prometheus.get_prometheus_registry() is REGISTRY
    page = generate_latest(REGISTRY).decode()
    assert 'vllm:saguaro_hits_total{engine="0",model_name="ours"} 3.0' in page
    names = {metric.name for metric in reader.get_metrics_snapshot()}  # LLM.get_metrics
    assert {PREFIX + metric.name for metric in METRICS} <= names
    writer.close()


# ---- what is counted ----


def test_histogram_bounds_are_inclusive() -> None:
    """A value on a bound falls into the next bucket, unlike Prometheus' `le`."""
    histogram = Histogram((0.1, 0.2))
    for value in (0.05, 0.1, 0.15, 0.2, 0.3):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]


def test_lookups_are_counted_by_position() -> None:
    """Positions are shifted, or part hits count as hits."""
    game = Game()
    game.start("a")
    game.draft.build(0, len(GAME_PROMPT), [], {(0, 7): [8, 9, 10]})
    game.propose(game.row("a", [7]))  # a hit after the prompt: position 0
    game.draft.build(0, len(GAME_PROMPT) + 1, [8, 9, 10], {(2, 5): [6]})
    game.propose(game.row("a", [8, 9, 5], verified=3))  # two accepted; one draft of three: a part hit
    game.propose(game.row("a", [6, 1], verified=1))  # one accepted; a miss
    totals = game.proposer.totals
    assert (totals.hits, totals.part_hits, totals.misses) == (1, 1, 1)
    assert totals.lookups_per_pos[:4] == [1, 1, 1, 0]
    assert totals.hits_per_pos[:4] == [1, 0, 0, 0]
    stats = game.proposer.stats()
    assert all(isinstance(value, (int, float)) for value in stats.values()), "users subtract them"


@pytest.mark.parametrize(("steps", "unfinished"), ((3, True), (2000, False)))
def test_the_draft_tells_of_cancelled_branches_and_its_steps(steps: int, unfinished: bool) -> None:
    """Finished branches count as cancelled, or cancelled ones do not."""
    target, _ = make()
    target.tell([target.start(0, PROMPT)], depth=TREE_DEPTH)
    target.run(steps)
    branches = len(target.branches(0))
    assert branches == 10
    target.tell(outcomes=[target.outcome(0, [VOCABULARY - 1])], depth=TREE_DEPTH)
    target.run()
    assert sum(push.cancelled for push in target.pushes) == (branches if unfinished else 0)
    seconds = [step for push in target.pushes for step in push.tree_seconds]
    assert len(seconds) == (1 if unfinished else TREE_DEPTH + 1) + TREE_DEPTH + 1
    assert all(0 < step < 5 for step in seconds)


def test_branches_of_a_finished_request_are_cancelled() -> None:
    """Requests that end leave branches that count as built."""
    target, _ = make()
    target.tell([target.start(0, PROMPT), target.start(1, PROMPT[:3])], depth=TREE_DEPTH)
    target.run(3)
    target.tell(outcomes=[target.outcome(1, [2])], finished=[0])
    target.run()
    assert sum(push.cancelled for push in target.pushes) == 20


# ---- documents ----


def metric_names() -> set[str]:
    """Every name that a query may use."""
    names = set()
    for metric in METRICS:
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[metric.kind]
        names |= {PREFIX + metric.name + suffix for suffix in suffixes}
    return names


def dashboard() -> dict:
    return json.loads((DOCS / "grafana" / "saguaro.json").read_text())


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """A panel that stays empty."""
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 10
    vllm = {"vllm:spec_decode_num_accepted_tokens_total", "vllm:generation_tokens_total"}
    used = set()
    for expression in expressions:
        names = set(re.findall(r"vllm:\w+", expression))
        assert names and names <= metric_names() | vllm, expression
        assert expression.count("(") == expression.count(")")
        labels = set(re.findall(r"(\w+)=~?\"", expression)) | set(
            label for group in re.findall(r"by ?\(([\w, ]+)\)", expression) for label in re.split(r", *", group)
        )
        assert labels <= {"model_name", "engine", "position", "kind", "le"}, expression
        used |= names
    histogram = {name for name in metric_names() if "tree_step_seconds" in name}
    missing = metric_names() - histogram - used
    assert not missing, f"shown in no panel: {missing}"


def test_the_dashboard_is_what_grafana_imports() -> None:
    """Panels that overlap, share an id, or name a data source of somebody else's Grafana."""
    board = dashboard()
    assert board["schemaVersion"] >= 38 and board["id"] is None and board["uid"]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["DS_PROMETHEUS"]["type"] == "datasource"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
            assert panel["title"] and panel["description"]


def test_every_metric_is_documented() -> None:
    """docs/metrics.md lags behind, or gives another type."""
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(vllm:saguaro_\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    documented = {name: (kind, {label for label in re.findall(r"`(\w+)`", labels)}) for name, kind, labels in rows}
    expected = {
        PREFIX + metric.name + ("_total" if metric.kind == "counter" else ""): (
            metric.kind,
            {metric.label} if metric.label else set(),
        )
        for metric in METRICS
    }
    assert documented == expected
