"""What is configured is what is used: no variable and no file beats or completes it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import Credentials
from fsspec import config as fsspec_config
from typer.testing import CliRunner

from kvshelf.backends import open_backend, s3_errors
from kvshelf.cli.app import app
from kvshelf.errors import ConfigError, StorageError
from tests.sim.s3 import BUCKET, Request, ScriptedS3

pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")

from kvshelf.backends.s3_settings import Keys, resolve

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_account")]

#: What does not vary of a signature: key, region, signed headers.
_SIGNED = re.compile(r"Credential=(\w+)/\d+/([\w-]+).*SignedHeaders=([\w;-]+)")
#: What varies from one request to the next.
_VARIES = ("x-amz-date", "user-agent", "amz-sdk-invocation-id")

Asked = Counter[tuple[str, str, tuple[str, ...]]]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedS3, ScriptedS3]]:
    """The configured one, and another."""
    with ScriptedS3() as configured, ScriptedS3() as other:
        yield configured, other


def options_for(server: ScriptedS3, **more: Any) -> dict[str, Any]:
    """Return options that leave nothing open."""
    return {
        "endpoint_url": server.endpoint,
        "key": "configured",
        "secret": "a secret",
        "client_kwargs": {"region_name": "us-west-2"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        **more,
    }


def asked(server: ScriptedS3, options: dict[str, Any]) -> Asked:
    """Do what engines do, and return the requests."""
    server.requests.clear()
    server.objects[f"{BUCKET}/kv/a/old"] = b"", 1e9
    s3_errors._known_until.clear()
    with closing(open_backend(f"s3://{BUCKET}/kv", storage_options=options)) as backend:
        calls: list[Callable[[], object]] = [
            lambda: backend.write("a/x", [b"1"]),
            lambda: backend.stat(["a/x", "a/y"]),
            lambda: backend.open("a/x"),
            lambda: list(backend.list()),
            lambda: backend.touch("a/old"),
            lambda: backend.delete(["a/x"]),
        ]
        for call in calls:
            with suppress(StorageError):
                call()
    # Temporaries have random names, as in what is deleted.
    return Counter(
        (request.method, re.sub(r"[0-9a-f]{16}\.tmp", "", request.url), tuple(_headers(request)))
        for request in server.requests
    )


def _headers(request: Request) -> Iterator[str]:
    for name, value in sorted(request.headers.items()):
        if name.lower() in _VARIES:
            continue
        signed = _SIGNED.search(value)
        shown = " ".join(signed.groups()) if signed is not None else value
        yield re.sub(r"(?<=md5: |256: )[\w+/=]{24,}", "", f"{name.lower()}: {shown}")


@pytest.fixture(scope="module")
def undisturbed(servers: tuple[ScriptedS3, ScriptedS3]) -> dict[str, Any]:
    """What each client asks where nothing but the options says anything; by client."""
    return {}


#: Each variable that obstore takes a setting from, but for encryption, which no option has.
OF_OBSTORE = {
    **dict.fromkeys(("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), "OTHER"),
    **dict.fromkeys(("AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT", "AWS_PROXY_URL"), "OTHER"),
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "OTHER",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/keys",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/no/token",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/no/token",
    **dict.fromkeys(("AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME"), "arn:aws:iam::123456789012:role/x"),
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "foreign"),
    **dict.fromkeys(("AWS_SESSION_TOKEN", "AWS_TOKEN"), "foreign"),
    **dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "mars-1"),
    **dict.fromkeys(("AWS_BUCKET", "AWS_BUCKET_NAME"), "other"),
    "AWS_CHECKSUM_ALGORITHM": "crc64nvme",
    "AWS_CONDITIONAL_PUT": "disabled",
    "AWS_COPY_IF_NOT_EXISTS": "multipart",
    "AWS_REQUEST_PAYER": "requester",
    "AWS_DEFAULT_CONTENT_TYPE": "text/x-foreign",
    "AWS_ALLOW_HTTP": "false",
    **dict.fromkeys(("AWS_CONNECT_TIMEOUT", "AWS_READ_TIMEOUT", "AWS_TIMEOUT"), "1ns"),
    **dict.fromkeys(("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_SKIP_SIGNATURE"), "true"),
    **dict.fromkeys(("AWS_UNSIGNED_PAYLOAD", "AWS_S3_EXPRESS", "AWS_IMDSV1_FALLBACK"), "true"),
    **dict.fromkeys(("AWS_DISABLE_BULK_DELETE", "AWS_DISABLE_TAGGING"), "true"),
    **dict.fromkeys(("AWS_ALLOW_INVALID_CERTIFICATES", "AWS_HTTP2_ONLY"), "true"),
}
HOSTILE_PROFILE = """[default]
endpoint_url = OTHER
region = mars-1
aws_access_key_id = foreign
aws_secret_access_key = foreign
aws_session_token = foreign
use_dualstack_endpoint = true
use_fips_endpoint = true
services = others
s3 =
  addressing_style = virtual
  use_accelerate_endpoint = true
  use_dualstack_endpoint = true
[services others]
s3 =
  endpoint_url = OTHER
"""
#: Each variable that botocore takes from the environment and that says where or as whom.
OF_BOTOCORE = {
    **dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), "OTHER"),
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "foreign"),
    **dict.fromkeys(("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"), "foreign"),
    **dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "mars-1"),
    **dict.fromkeys(("AWS_PROFILE", "AWS_DEFAULT_PROFILE"), "nobody"),
    **dict.fromkeys(("AWS_USE_DUALSTACK_ENDPOINT", "AWS_USE_FIPS_ENDPOINT"), "true"),
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "OTHER",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/keys",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/no/token",
    "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/x",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "OTHER",
    "AWS_AUTH_SCHEME_PREFERENCE": "sigv4a",
    "AWS_SIGV4A_SIGNING_REGION_SET": "*",
    **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), HOSTILE_PROFILE),
}


VARIABLES = {"obstore": OF_OBSTORE | OF_BOTOCORE, "s3fs": OF_BOTOCORE}


@pytest.mark.parametrize(
    ("client", "names"),
    [(client, list(values)) for client, values in VARIABLES.items()]
    + [
        pytest.param(client, [name], marks=pytest.mark.slow, id=f"{client}-{name}")
        for client, values in VARIABLES.items()
        for name in values
    ],
)
def test_no_variable_changes_what_is_asked(
    servers: tuple[ScriptedS3, ScriptedS3],
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    client: str,
    names: list[str],
) -> None:
    """All at once, and in the slow tests each alone."""
    pytest.importorskip(client)
    configured, other = servers
    options = options_for(configured, client=client)
    if client not in undisturbed:
        # What a server does not know is learned once by a process.
        asked(configured, options)
        undisturbed[client] = asked(configured, options)
    for name in names:
        value = VARIABLES[client][name].replace("OTHER", other.endpoint)
        if "\n" in value:
            file = tmp_path / "hostile"
            file.write_text(value)
            value = str(file)
        monkeypatch.setenv(name, value)
    other.requests.clear()
    found = asked(configured, options)
    assert found == undisturbed[client]
    assert len(found) >= 7
    assert sum("configured us-west-2" in " ".join(headers) for *_, headers in found) >= 5
    assert not other.requests


def test_fsspec_s_configuration_of_s3_has_no_part(
    servers: tuple[ScriptedS3, ScriptedS3], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    configured, other = servers
    options = options_for(configured, client="s3fs")
    before = asked(configured, options)
    foreign = {"token": "foreign", "username": "foreign", "endpoint_url": other.endpoint}
    more = {"client_kwargs": {"endpoint_url": other.endpoint}, "requester_pays": True}
    monkeypatch.setitem(fsspec_config.conf, "s3", foreign | more)
    assert asked(configured, options) == before
    assert not other.requests


def test_option_for_who_pays_goes_with_each_request(
    servers: tuple[ScriptedS3, ScriptedS3],
) -> None:
    asked(servers[0], options_for(servers[0], requester_pays=True))
    payers = {request.headers.get("x-amz-request-payer") for request in servers[0].requests}
    assert payers == {"requester"}


def test_checksum_that_the_environment_wants_cannot_be_left_out(
    servers: tuple[ScriptedS3, ScriptedS3], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "SHA256")
    options = options_for(servers[0], checksum=False)
    with pytest.raises(ConfigError, match="AWS_CHECKSUM_ALGORITHM is set: unset it"):
        open_backend("s3://kvshelf-bucket/kv", storage_options=options)


PROFILES = """[default]
region = eu-central-1
[profile minio]
endpoint_url = http://minio:9000
region = of-minio
aws_access_key_id = minio
aws_secret_access_key = minio
s3 =
  addressing_style = virtual
[profile ceph]
services = ours
region = of-ceph
[profile double]
use_dualstack_endpoint = true
region = eu-west-1
[services ours]
s3 =
  endpoint_url = http://ceph:7480
"""


@pytest.mark.parametrize(
    "case",
    [
        " -> https://s3.eu-central-1.amazonaws.com eu-central-1 path AWS",
        "AWS_REGION=x-1 -> https://s3.x-1.amazonaws.com x-1 path AWS",
        "use_ssl= AWS_REGION=x-1 -> http://s3.x-1.amazonaws.com x-1 path AWS",
        # Partitions and variants of AWS.
        "AWS_REGION=cn-north-1 -> https://s3.cn-north-1.amazonaws.com.cn cn-north-1 path AWS",
        "AWS_DEFAULT_REGION=us-gov-west-1 -> "
        "https://s3.us-gov-west-1.amazonaws.com us-gov-west-1 path AWS",
        "AWS_REGION=us-iso-east-1 -> https://s3.us-iso-east-1.c2s.ic.gov us-iso-east-1 path AWS",
        "AWS_USE_FIPS_ENDPOINT=true -> "
        "https://s3-fips.eu-central-1.amazonaws.com eu-central-1 virtual AWS",
        "AWS_PROFILE=double -> https://s3.dualstack.eu-west-1.amazonaws.com eu-west-1 path AWS",
        # Profiles with an endpoint, and one of which the endpoint is ignored.
        "AWS_PROFILE=minio -> http://minio:9000 of-minio virtual profile",
        "AWS_PROFILE=ceph -> http://ceph:7480 of-ceph path profile",
        "AWS_PROFILE=ceph AWS_IGNORE_CONFIGURED_ENDPOINT_URLS=true -> "
        "https://s3.of-ceph.amazonaws.com of-ceph path AWS",
        # The environment comes before its profile, and the service's variable before the other.
        "AWS_PROFILE=ceph AWS_ENDPOINT_URL_S3=http://e AWS_ENDPOINT_URL=http://f -> "
        "http://e of-ceph path AWS_ENDPOINT_URL_S3",
        # The profile of the options comes before the environment, which completes it.
        "profile=minio AWS_ENDPOINT_URL=http://e AWS_REGION=e -> "
        "http://minio:9000 of-minio virtual profile",
        "profile=double AWS_ENDPOINT_URL=http://e -> http://e eu-west-1 path AWS_ENDPOINT_URL",
        # The addressing of a profile goes with its endpoint.
        "endpoint_url=http://o/ AWS_PROFILE=minio -> http://o of-minio path storage_options:",
    ],
)
def test_what_is_not_in_the_options_comes_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    (tmp_path / "config").write_text(PROFILES)
    options: dict[str, Any] = {"key": "k", "secret": "s"}
    given, _, expected = case.partition("-> ")
    for name, _, value in (one.partition("=") for one in given.split()):
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            options[name] = value or False
    found = resolve(options)
    source = found.rows["endpoint"][1].split()[0].rstrip(",")
    assert f"{found.endpoint} {found.region} {found.style} {source}" == expected


def test_profile_brings_its_keys_to_its_endpoint(
    servers: tuple[ScriptedS3, ScriptedS3], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured, other = servers
    content = PROFILES.replace("http://minio:9000", configured.endpoint).replace("virtual", "path")
    (tmp_path / "config").write_text(content)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, other.endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "foreign")
    requests = asked(configured, {"profile": "minio"})
    assert sum("minio of-minio" in " ".join(headers) for *_, headers in requests) >= 5
    assert "foreign" not in str(requests)
    assert not other.requests


class Renewing(Credentials):  # type: ignore[misc, unused-ignore]
    """Keys of a role, which botocore renews by itself."""

    def refresh_needed(self) -> bool:
        return False


def test_keys_are_good_for_minutes_and_those_of_a_role_are_not_read_again() -> None:
    made: list[Renewing] = []

    def make() -> Renewing:
        made.append(Renewing(f"k{len(made)}", "s"))
        return made[-1]

    keys = Keys(make)
    good_for = keys.provide()["expires_at"] - datetime.now(UTC)
    assert timedelta(minutes=4) < good_for <= timedelta(minutes=5)
    assert not keys.reread()
    assert len(made) == 1


def test_endpoint_may_begin_with_the_bucket() -> None:
    style = {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}
    for host, url in {"h": "https://b.h", "b.h": "https://b.h"}.items():
        options = {"anon": True, **style, "endpoint_url": f"https://{host}"}
        assert resolve(options).endpoint_of("b") == url


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://b/x", {"endpoint": "http://h"}, "'endpoint'; did you mean endpoint_url?"),
        ("s3://b/x", {"region": "r"}, "'region'; did you mean client_kwargs.region_name?"),
        ("s3://b/x", {"aws_access_key_id": "k"}, "'aws_access_key_id'; did you mean key?"),
        ("s3://b/x", {"client_kwargs": {"region": "r"}}, "did you mean client_kwargs.region_name?"),
        ("s3://b/x", {"addressing_style": "path"}, "mean config_kwargs.s3.addressing_style?"),
        ("s3://b/x", {"config_kwargs": {"s3": {"style": "path"}}}, "config_kwargs.s3.addressing"),
        ("s3://b/x", {"kee": 1, "anom": 1}, "mean key?; unknown storage option 'anom'"),
        ("s3://b/x", {"chequesum": True}, "did you mean checksum?"),
        ("s3://b/x", {"cache_regions": True}, "did you mean client: s3fs, which has it?"),
        ("s3://b/x", {"client": "s3fs", "endpoint": "http://h"}, "did you mean endpoint_url?"),
        ("s3://b/x", {"client": "s3fs", "kee": 1}, "did you mean key?"),
        ("/no/such", {"creat": False}, "'creat'; did you mean create?"),
        ("/no/such", {"region": "x"}, "'region'; known: create, fsync"),
        ("ftp://h/x", {"usernam": "me"}, "'usernam'; did you mean username?"),
    ],
)
def test_options_are_checked_by_name(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="unknown storage option") as error:
        open_backend(url, storage_options=options)
    assert message in str(error.value)
    result = CliRunner().invoke(app, ["ls", url, "--storage-options", json.dumps(options)])
    assert result.exit_code == 2


def test_doctor_says_where_each_setting_comes_from(
    servers: tuple[ScriptedS3, ScriptedS3], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "of-the-environment")
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
    options = {"endpoint_url": servers[0].endpoint, "key": "a key", "secret": "a secret"}
    env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(options)}
    result = CliRunner().invoke(app, ["doctor", "s3://kvshelf-bucket/kv", "--json"], env=env)
    checks = {check["name"]: check["found"] for check in json.loads(result.stdout)["checks"]}
    assert checks["s3 endpoint"] == f"{servers[0].endpoint} (storage_options: endpoint_url)"
    assert checks["s3 region"] == "of-the-environment (AWS_REGION)"
    assert checks["s3 addressing"] == "path (default)"
    assert checks["s3 keys"] == "an access key (storage_options: key, secret)"
    assert checks["s3 encryption"] == "AES256 (AWS_SERVER_SIDE_ENCRYPTION)"
    assert "a secret" not in result.stdout and "a key" not in result.stdout
