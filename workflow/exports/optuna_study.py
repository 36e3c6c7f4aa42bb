"""The trials as a study of Optuna, for its dashboard and its figures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from apps.contract import Plain, canonical_json
from workflow import extras
from workflow.ledger import Ledger, TrialState
from workflow.scores import mean_and_spread
from workflow.space import Dimension, Integer, Real, Scalar
from workflow.study import StudyFile
from workflow.whole import whole_database

# What is aside does not count any more; Optuna has no state for that.
STATES = {
    "done": "COMPLETE",
    "failed": "FAIL",
    "aside": "FAIL",
    "dropped": "PRUNED",
    "running": "RUNNING",
    "waiting": "WAITING",
}


def write_optuna(ledger: Ledger, file: StudyFile, target: str) -> None:
    """Write an SQLite file with one study, whose trials have our numbers.

    Raises:
        N3LOError: the file cannot be replaced.
        ModuleNotFoundError: Optuna is not installed.
    """
    extras.require("optuna")
    with whole_database(Path(target)) as built, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls half of itself experimental
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = optuna.storages.RDBStorage(f"sqlite:///{built}")
        objectives = [ledger.scoring.objective, *ledger.scoring.further]
        study = optuna.create_study(
            storage=storage,
            study_name=file.study.name,
            directions=[f"{each.goal}imize" for each in objectives],
        )
        study.set_metric_names([each.metric for each in objectives])
        study.add_trials(list(_trials(ledger, file)))
        storage.remove_session()
        storage.engine.dispose()


def _trials(ledger: Ledger, file: StudyFile) -> Iterator[Any]:
    from optuna.trial import FrozenTrial, TrialState

    further = [each.metric for each in ledger.scoring.further]
    curves = {} if further else _curves(ledger)  # Optuna has them for one objective only
    space, own = file.space, file.own_values()
    distributions = {path: _distribution(each) for path, each in space.dimensions.items()}
    rows = {row["trial"]: row for row in ledger.trials().to_dict("records")}
    for number, trial in sorted(ledger.trials_by_number.items()):
        point = space.completed(trial.point, own)
        values = [float(rows[number][name]) for name in ("score", *further)]
        status = "aside" if point is None else trial.status
        if status == "done" and any(map(math.isnan, values)):
            status = "failed"
        state = TrialState[STATES[status]]
        params = {path: _to_optuna(space.dimensions[path], v) for path, v in (point or {}).items()}
        waits = state == TrialState.WAITING
        begin, end = _span(ledger, trial)
        yield FrozenTrial(
            number=number,
            trial_id=-1,  # the storage gives it
            state=state,
            value=None,
            values=values if state == TrialState.COMPLETE else None,
            datetime_start=None if waits else begin,
            datetime_complete=end if state.is_finished() else None,
            params={} if waits else params,
            distributions={} if waits else {path: distributions[path] for path in params},
            user_attrs=_facts(trial),
            system_attrs={"fixed_params": params} if waits else {},
            intermediate_values=curves.get(number, {}),
        )


def _distribution(dimension: Dimension) -> Any:
    from optuna import distributions

    if isinstance(dimension, Real):
        return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if isinstance(dimension, Integer):
        return distributions.IntDistribution(dimension.low, dimension.high, log=dimension.log)
    return distributions.CategoricalDistribution(_choices(dimension.values))


def _to_optuna(dimension: Dimension, value: Scalar) -> Scalar:
    if isinstance(dimension, Real | Integer):
        return dimension.clip(value)
    return _choices(dimension.values)[dimension.index(value)]


def _choices(values: list[Scalar]) -> list[Scalar]:
    """As they are; as text where Optuna would take two for one, such as True and 1."""
    return values if len(set(values)) == len(values) else list(map(canonical_json, values))


def _facts(trial: TrialState) -> dict[str, Plain]:
    """What is to be seen of a trial beside its point and its score."""
    proposal, foms = trial.proposal, trial.foms()
    facts: dict[str, Plain] = {
        "status": trial.status,
        "folds": [None if fom is None or math.isnan(fom) else fom for fom in foms],
        "seconds": sum(trial.facts("seconds")),
        **proposal.settings,
        **proposal.tags,
    }
    spread = mean_and_spread(trial.facts("fom"))[1]
    if not math.isnan(spread):
        facts["spread"] = spread
    if proposal.parent is not None:
        facts["parent"] = proposal.parent
    return facts


def _span(ledger: Ledger, trial: TrialState) -> tuple[datetime, datetime]:
    """When its first task began and its last one ended; in local time, as Optuna has them."""
    known = [
        seconds
        for state in trial.tasks.values()
        for seconds in (state.begun, state.submitted, state.ended)
        if math.isfinite(seconds)
    ] or [ledger.sessions[-1]["time"]]  # of one that is aside before anything of it began
    return datetime.fromtimestamp(min(known)), datetime.fromtimestamp(max(known))


def _curves(ledger: Ledger) -> dict[int, dict[int, float]]:
    """The objective's metric by trial and epoch: the mean over its folds, as far as all are."""
    metric, history = ledger.scoring.objective.metric, ledger.history()
    if metric not in history:
        return {}
    known = history[["trial", "fold", "epoch", metric]].dropna().to_dict("records")
    curves: dict[int, dict[int, dict[int, float]]] = {}
    for trial, fold, epoch, value in map(dict.values, known):
        curves.setdefault(trial, {}).setdefault(epoch, {})[fold] = value
    return {trial: dict(_means(epochs)) for trial, epochs in curves.items()}


def _means(epochs: dict[int, dict[int, float]]) -> Iterator[tuple[int, float]]:
    folds = {fold for by_fold in epochs.values() for fold in by_fold}
    for epoch, by_fold in epochs.items():
        if by_fold.keys() == folds:
            yield epoch, mean_and_spread(list(by_fold.values()))[0]
