"""Run a Kubernetes API server on this machine, for tests and for trying things.

Usage: python -m tests.tools.kubernetes_here FOLDER [CRD ...]
       python -m tests.tools.kubernetes_here --build

It is etcd and kube-apiserver, on loopback, with certificates of their own: objects are checked and
kept, and no pod ever runs. It takes etcd-server and openssl, and creates what each CRD (a file of
JSON, which may be gzipped) describes. All files lie in FOLDER, which is made and removed. It prints
what to put into the environment of another terminal:

    export KUBECONFIG=FOLDER/kubeconfig

Ctrl-C, or the end of its stdin, ends both.

`--build` makes kube-apiserver from the source packages of Debian 12, by Debian's golang-go, in
~/.cache/isthmus/kubernetes. That takes half an hour and 3 GB, and is done once. The packages come
from where this machine's apt takes them, or from what a file that APT_CONFIG names says.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.fakes.waiting import wait_for
from tests.tools.daemons import Daemons, free_ports, hold

CACHE = Path.home() / ".cache" / "isthmus" / "kubernetes"
SERVER = CACHE / "kube-apiserver"
SUITE = "bookworm"
KUBERNETES = "k8s.io/kubernetes"
REFLECTION = "golang-github-modern-go-reflect2"
OPENAPI = "pkg/generated/openapi"
START_S = 120.0
LOOK_S = 0.2


def main(arguments: list[str]) -> int:
    """Build or hold one; return the exit status."""
    if arguments == ["--build"]:
        if not SERVER.is_file():
            build()
        print(SERVER)
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if missing := missing_programs():
        print(missing, file=sys.stderr)
        return 1
    folder = Path(arguments[0]).absolute()
    crds = [Path(argument).absolute() for argument in arguments[1:]]
    folder.mkdir(mode=0o700, parents=True)
    try:
        with Daemons(folder, {}) as daemons:
            start(daemons, folder, crds)
            hold(f"export KUBECONFIG={folder / 'kubeconfig'}")
    finally:
        shutil.rmtree(folder)
    return 0


def missing_programs() -> str:
    """Return what is not here and how to have it; empty: nothing is missing."""
    if not SERVER.is_file():
        return f"{SERVER}: not here; python -m tests.tools.kubernetes_here --build (half an hour)"
    missing = [name for name in ("etcd", "openssl") if shutil.which(name) is None]
    return f"{', '.join(missing)}: not here; apt-get install etcd-server openssl" * bool(missing)


def build() -> None:
    """Make kube-apiserver; what was done before is not done again."""
    if missing := [name for name in ("apt-get", "go") if shutil.which(name) is None]:
        raise SystemExit(f"{', '.join(missing)}: not here; it takes Debian, and its golang-go")
    source = _source("kubernetes")
    # The one that Kubernetes came with reads maps as Go before 1.18 had them, and crashes.
    vendored = source / "vendor" / "github.com" / "modern-go" / "reflect2"
    if not (vendored / "go_above_118.go").exists():
        shutil.rmtree(vendored)
        shutil.copytree(_source(REFLECTION), vendored)
    # The generators want a GOPATH, as the makefiles of that version have it.
    inside = CACHE / "gopath" / "src" / KUBERNETES
    inside.parent.mkdir(parents=True, exist_ok=True)
    inside.unlink(missing_ok=True)
    inside.symlink_to(source)
    env = {
        **os.environ,
        "GOPATH": str(CACHE / "gopath"),
        "GOCACHE": str(CACHE / "gocache"),
        "PWD": str(inside),
        "GO111MODULE": "off",
        "GOPROXY": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    generator = CACHE / "openapi-gen"
    if not generator.is_file():
        package = "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"
        _run(["go", "build", "-o", str(generator), package], inside, env)
    if not (source / OPENAPI / "zz_generated.openapi.go").is_file():
        words = [
            *(str(generator), "--logtostderr", "-i", ",".join(_described(source))),
            *("-p", f"{KUBERNETES}/{OPENAPI}", "-O", "zz_generated.openapi"),
            *("-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"),
            *("-r", str(CACHE / "violations"), "--output-base", str(CACHE / "gopath" / "src")),
        ]
        _run(words, inside, env)
    made = CACHE / "made"
    _run(["go", "build", "-o", str(made), "./cmd/kube-apiserver"], inside, env)
    made.rename(SERVER)


def _source(package: str) -> Path:
    """Return the folder of a package's unpacked source, which apt fetches and checks."""
    folder = CACHE / package
    unpacked = folder / "source"
    if unpacked.is_dir():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run(["apt-get", "source", "--download-only", f"{package}/{SUITE}"], folder, os.environ)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"apt cannot fetch the source package {package} of Debian's {SUITE}: its sources want "
            "a line `deb-src` for that (`Types: deb deb-src`), and then `apt-get update`"
        ) from error
    (archive,) = folder.glob("*.orig.tar.gz")
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    _run(["tar", "xf", str(archive), "--strip-components=1"], scratch, os.environ)
    scratch.rename(unpacked)
    return unpacked


def _described(source: Path) -> list[str]:
    """Return the packages whose types are part of the API's own description."""
    found = set()
    for top in ("pkg", "staging", "cmd", "plugin"):
        for path in (source / top).rglob("*.go"):
            place = path.parent.relative_to(source).as_posix()
            if "code-generator/" in place or "sample-apiserver/" in place:
                continue
            if not path.name.endswith("_test.go") and b"+k8s:openapi-gen=" in path.read_bytes():
                found.add(f"{KUBERNETES}/{place.replace('staging/src/', 'vendor/')}")
    return sorted(found)


def start(daemons: Daemons, folder: Path, crds: list[Path]) -> None:
    """Start both; return once the API server is ready and has the kinds of the CRDs."""
    _certify(folder)
    at, peers, api = (f"https://127.0.0.1:{port}" for port in free_ports(3))
    pair, ca = (str(folder / "server.pem"), str(folder / "server.key")), str(folder / "ca.pem")
    daemons.start(
        *("etcd", "etcd", "--data-dir", str(folder / "etcd")),
        *("--listen-client-urls", at, "--advertise-client-urls", at),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        *("--initial-cluster", f"default={peers}"),
        *("--cert-file", pair[0], "--key-file", pair[1]),
        *("--client-cert-auth", "--trusted-ca-file", ca),
        *("--peer-cert-file", pair[0], "--peer-key-file", pair[1]),
        *("--peer-client-cert-auth", "--peer-trusted-ca-file", ca),
    )
    process = daemons.start(
        *("kube-apiserver", str(SERVER), "--etcd-servers", at, "--etcd-cafile", ca),
        *("--etcd-certfile", pair[0], "--etcd-keyfile", pair[1]),
        *("--bind-address", "127.0.0.1", "--secure-port", api.rpartition(":")[2]),
        *("--tls-cert-file", pair[0], "--tls-private-key-file", pair[1]),
        *("--client-ca-file", ca, "--authorization-mode", "RBAC", "--anonymous-auth=false"),
        *("--service-account-issuer", "https://kubernetes.here"),
        *("--service-account-key-file", pair[1], "--service-account-signing-key-file", pair[1]),
        *("--service-cluster-ip-range", "10.0.0.0/24", "--endpoint-reconciler-type", "none"),
        *("--cert-dir", str(folder)),
    )
    _write_kubeconfig(folder, api)
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(folder / "admin.pem", folder / "admin.key")

    def asked(path: str, body: bytes | None = None) -> bool:
        if process.poll() is not None:
            raise RuntimeError((folder / "kube-apiserver.log").read_text()[-1000:])
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{api}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as answer:
                return bool(answer.status < 300)
        except urllib.error.HTTPError as error:
            if body is not None:
                raise RuntimeError(error.read(1000).decode(errors="replace")) from error
        except OSError:
            pass
        return False

    wait_for(lambda: asked("/readyz"), "the API server", START_S, LOOK_S)
    for path in crds:
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        spec = json.loads(text)["spec"]
        asked("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", text)
        made = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        wait_for(functools.partial(asked, made), spec["names"]["kind"], START_S, LOOK_S)


def _certify(folder: Path) -> None:
    """Make an authority, and what the server and its administrator show."""

    def made(name: str, subject: str, *more: str) -> None:
        words = [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", subject),
            *("-newkey", "rsa:2048"),  # the API server reads no other key that openssl writes
            *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")),
        ]
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)

    made("ca", "/CN=kubernetes-here")
    signed = [
        *("-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key")),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
        *("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
        *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
    ]
    made("server", "/CN=kube-apiserver", *signed)
    made("admin", "/O=system:masters/CN=admin", *signed)


def _write_kubeconfig(folder: Path, api: str) -> None:
    """Write what kubectl and clients read; JSON is YAML."""
    cluster = {"server": api, "certificate-authority": str(folder / "ca.pem")}
    files = {"client-certificate": "admin.pem", "client-key": "admin.key"}
    user = {key: str(folder / name) for key, name in files.items()}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "admin", "user": user}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config, indent=1))


def _run(words: list[str], folder: Path, env: os._Environ[str] | dict[str, str]) -> None:
    print(f"+ {words[0]} {words[1]} …", file=sys.stderr, flush=True)
    subprocess.run(["nice", *words], cwd=folder, env=env, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
