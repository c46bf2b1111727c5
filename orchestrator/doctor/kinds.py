"""The doctor's table of findings: code, what was found; why it matters; the cure.

Checks return facts, which fill the places in braces. A kind with several texts has a row for each;
what follows the slash tells them apart, and is no part of the code.
"""

from __future__ import annotations

from typing import NamedTuple

from isthmus.orchestrator.doctor.findings import Finding, Severity

_TABLE = """\
error protocol-unknown: isthmus {build} speaks control protocol {low} to {high}, this one \
{own_low} to {own_high}
  the coordinator refuses its agent
  pip install isthmus=={own}
error protocol-unknown/exchange: isthmus {build} has no exchange protocol in common with {first} \
at {where}
  gateways of the two refuse each other
  pip install isthmus=={first}
warning version-differs: isthmus {build} is installed, and {own} here
  sites of different builds may compute or exchange differently
  pip install isthmus=={own}
error {code}: {lacks}
  ranks and gateways need it
  {cure}
warning plain-python: isthmus runs as plain Python there, for {why}
  gateways encode and sum a hundred times more slowly, or worse
  install gcc (or clang) and Python's headers, then isthmus again, without ISTHMUS_PLAIN
warning torch-differs: torch {torch} is installed, and {first} at {where}
  other buckets make a run fail (LAYOUT_MISMATCH), other kernels other sums
  pip install torch=={first}
error address-refused: nothing can listen on {bound}: {reason}
  its gateways listen there, and peers dial it
  {cure}
error few-open-files: a process may have {files} files open, and a gateway or a rank needs {needed}
  connections are refused with EMFILE, and the run fails
  ulimit -n {raised}  (a service: LimitNOFILE={raised})
warning few-open-files/later: a process may have {files} files open, and a gateway or a rank needs \
up to {needed}
  connections are refused with EMFILE, and the run fails
  ulimit -n {raised}  (a service: LimitNOFILE={raised})
warning few-processes: {user} may have {allowed} processes and threads, and {count} processes of \
the run take about {wanted}
  a thread that cannot be started ends its process
  ulimit -u {raised}  (a service: TasksMax=infinity)
warning little-locked-memory: a process may lock {locked} of memory, and there is InfiniBand
  NCCL locks the buffers that it sends over InfiniBand, and fails where it cannot
  ulimit -l unlimited  (a service: LimitMEMLOCK=infinity)
error disk-full: {path}: {free} are free
  the run's files cannot be written, and the run fails
  df -h {parent}, then delete what is not needed, or name another folder
error disk-full/checkpoints: {path}: {free} are free
  no checkpoint can be written, and the run keeps nothing to go on from
  df -h {parent}, then delete what is not needed, or name another folder
error few-free-files: {path}: only {free_files} more files can be made
  the run's files are many, and the first that cannot be made ends the run
  df -i {parent}, then delete files, or name another folder
error few-free-files/checkpoints: {path}: only {free_files} more files can be made
  a checkpoint whose files cannot be made fails
  df -i {parent}, then delete files, or name another folder
warning little-disk: {path}: {free} are free
  a long run's metrics and logs grow to {wanted}
  df -h {parent}, then delete what is not needed, or name another folder
error {what}-not-writable: nothing can be written in {path}: {error}
  {files} are written there
  mkdir -p {quoted} && sudo chown {user} {quoted}, or name another {setting}
error {what}-not-writable/file: {file} is a file, and no folder
  {files} are written there
  name a folder in {setting}
error checkpoints-not-openable: {url} cannot be opened: {error}
  no checkpoint can be written there, nor read
  python -c 'import fsspec; print(fsspec.available_protocols())' lists the kinds of URLs; install \
what is missing, at each site, too, or name another `checkpoint: {{to: …}}`
error little-shared-memory/nccl: shared memory (/dev/shm) has {free} free, for {ranks} ranks
  NCCL sets up its buffers there, and fails
  sudo mount -o remount,size={size} /dev/shm  (docker: --shm-size={size})
warning little-shared-memory: shared memory (/dev/shm) has {free} free, for {ranks} ranks
  workers of a DataLoader hand over batches there: a bus error ends them when it is full
  sudo mount -o remount,size={size} /dev/shm  (docker: --shm-size={size})
warning accelerators-unseen: there are GPUs, and torch sees none{reason}
  ranks compute on CPUs then
  nvidia-smi; python -c 'import torch; print(torch.version.cuda)'
error few-accelerators: torch sees {seen} GPUs, and a node has {wanted} ranks
  each rank of a node takes a GPU of its own, and the last ones find none
  nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES; then `accelerators_per_node: {seen}`
error nccl-missing: torch has no NCCL
  ranks on GPUs sum over it inside the site
  pip install --force-reinstall torch  (its build for CUDA)
error accelerators-missing: the topology says {count} {device} a node of site {named}, and torch \
finds no accelerator on this machine
  ranks would compute on CPUs, and no plan or prediction hold
  nvidia-smi -L; python -c 'import torch; print(torch.version.cuda)'; then `accelerator: cpu` of \
site {named} where that is meant; to try without: `isthmus launch --allow-cpu` (`allow_cpu: true` \
in the job), `--emulate`, or `--set trainer.compute=modelled`
warning accelerators-missing/allowed: the topology says {count} {device} a node of site {named}, \
and torch finds no accelerator on this machine
  ranks compute on CPUs then, and no plan or prediction holds
  nvidia-smi -L; then `accelerator: cpu` of site {named} where that is meant
error few-accelerators/described: the topology says {count} {device} a node of site {named}, and \
this machine has {seen}
  each rank of a node takes a GPU of its own, and the last ones find none
  nvidia-smi -L; then `accelerator` and `accelerators_per_node` of site {named}, `accelerator: \
cpu` where that is meant; to try without: `--emulate`, or `--set trainer.compute=modelled`
warning accelerators-differ: the topology says {count} {device} a node of site {named}, and this \
machine has {other}
  plans and predictions count with the ones that the topology says
  nvidia-smi -L; then `accelerator` and `accelerators_per_node` of site {named}, `accelerator: \
cpu` where that is meant; to try without: `--emulate`, or `--set trainer.compute=modelled`
note numa-nodes: the machine has several NUMA nodes: {devices}
  a gateway on another node reads and writes what is farther away
  start the agent of site {named} under `numactl --cpunodebind=N`
note numa-nodes/differ: cards and network are not on the same NUMA nodes: {devices}
  what one of these cards sends crosses the link between the processors
  `wan: {{interfaces: […]}}` of site {named}, with one near each card
warning small-{verb}-buffer: {verb} buffers end at {most}, and the link from {source} to {target} \
holds {held}
  {verdict}
  sudo sysctl -w net.ipv4.tcp_{setting} {least_bytes}'
warning {wanted}-unavailable: {user} may choose {allowed} for TCP, not {wanted}
  {why}
  sudo modprobe tcp_{wanted} && sudo sysctl -w net.ipv4.tcp_allowed_congestion_control='{raised}'
warning slow-start-after-idle: connections to {target} start slowly after each pause, with {used}
  there is a pause in every step, and then some round trips of {rtt} with little on the way
  sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0
note no-kernel-tls: TLS to other sites is not the kernel's work: {lacks} lacks it
  gateways encrypt by OpenSSL, in the thread that moves all of their bytes
  sudo modprobe tls; else a kernel with CONFIG_TLS, and an OpenSSL built with enable-ktls
error no-route: no route leads to {address} of site {named}: {reason}
  its gateways cannot be dialled from here
  ip route get {address}
warning small-mtu: packets to {address} of site {named} have {mtu_bytes} bytes at most
  headers and interrupts take a large part of what the link carries
  ip route get {address}; sudo ip link set dev DEVICE mtu 1500
error clock-off/certificates: its clock is {off} {direction} this machine's
  certificates count as expired, or as not valid yet
  sudo timedatectl set-ntp true; timedatectl timesync-status
warning clock-off: its clock is {off} {direction} this machine's
  timelines, logs and events of sites do not line up
  sudo timedatectl set-ntp true; timedatectl timesync-status
error large-packets-lost: from {source} to {target}: {error}
  packets of full size are lost on the way, and ICMP does not say so
  sudo sysctl -w net.ipv4.tcp_mtu_probing=1, or sudo ip link set dev DEVICE mtu 1400
error unreachable: from {source} ({source_address}) to {target} ({target_address}), port {port}: \
{error}
  its gateways dial the other's, each on a port {chosen}
  at {target}: sudo iptables -I INPUT -p tcp -s {source_address} -d {target_address} -j ACCEPT; \
at {source}: ip route get {target_address} from {source_address}
error script-syntax: the entrypoint {script}: {error}
  each rank runs it
  python -m py_compile {quoted}
error script-unreadable: the entrypoint {script}: {error}
  each rank runs it
  ls -l {quoted}, then correct `entrypoint`, which begins at the job file's folder
error script-unreadable/denied: the entrypoint {script}: {error}
  each rank runs it
  setfacl -m u:{user}:r {quoted}
warning script-never-attaches: the entrypoint {script} joins, and never calls site.attach()
  each site would train by itself, and the run fail: NEVER_ATTACHED
  add to it, before the first step: site.attach(model, optimizer); or, if it is to average \
nothing: isthmus.join(averages=False)
warning script-never-joins: the entrypoint {script} never calls isthmus.join()
  the run waits for each rank to join, until failure.start_within is over
  add to it: site = isthmus.join(); site.attach(model, optimizer)
warning script-uses-own: the entrypoint {script} calls {call}(), and never site.global_parameters()
  under `regime: {regime}` a model's parameters are this site's own between two rounds
  evaluate, save and average weights inside `with site.global_parameters():`
error working-folder-missing: the working folder of the job file: {error}
  each rank runs the script there
  have the job's files lie there as here, or name the folder as the site's `job_folder` in the \
topology
error working-folder-missing/named: the working folder {folder}: {error}
  each rank runs the script there
  correct `working_folder: {folder}`, which begins at the job file's folder
error data-missing: no file matches {pattern!r}{reason}
  the shipped trainer reads all of it at each rank before the first step
  ls {pattern}, then correct {written!r}: it begins at the job's folder
error data-unreadable: {error}
  the shipped trainer reads all of it at each rank before the first step
  setfacl -R -m u:{user}:rX {parent}
error quicker-than-light: {file}:{line}: {message}
  `launch` refuses it where the WAN is real, for buffers and timeouts follow from it
  isthmus validate {file}
warning quicker-than-light/emulated: {file}:{line}: {message}
  `launch` refuses it where the WAN is real, for buffers and timeouts follow from it
  isthmus validate {file}
error coordinator-address-refused: no coordinator can listen on {endpoint}: {reason}
  `isthmus coordinator` binds it, and agents dial it
  ss -ltnp 'sport = :{port}', then stop it, or change `coordinator: {{bind: …}}`
error token-unsafe: the file of this user's secret cannot be used: {error}
  whoever knows it may start and stop runs as this user
  rm -f {quoted}, so that it is made anew
note no-network-namespaces: packets cannot be emulated here: {reason}
  connections pass through user space instead: nothing is lost on the way
  isthmus launch JOB --emulator relay, or sudo sysctl -w kernel.unprivileged_userns_clone=1; sudo \
modprobe tun; ls -l /dev/net/tun
error no-network-namespaces/asked: packets cannot be emulated here: {reason}
  the topology asks for `emulator: netns`
  isthmus launch JOB --emulator relay, or sudo sysctl -w kernel.unprivileged_userns_clone=1; sudo \
modprobe tun; ls -l /dev/net/tun
note gateways-chosen: gateways a node: {count}; {reasons}
  one gateway carries about {rate} each way
  where it is to be another number: `wan: {{gateways_per_node: …}}` of the site
note not-examined: {address} is not this machine's, so it was not examined
  what is wrong there is not among these findings
  isthmus doctor TOPOLOGY --at {named}='ssh HOST python', or there: isthmus doctor TOPOLOGY \
--site {named}
error no-answer: the machine cannot be examined: {reason}
  the processes of a site are started in the same way
  there: python -m isthmus.sites.facts
error key-unsafe: {error}
  without it the others refuse every connection
  chmod 600 {key}
error certificate-foreign: {error}
  without it the others refuse every connection
  isthmus certs issue --force {name}, where the authority is; take ca.pem along
error certificate-not-yet: {error}
  without it the others refuse every connection
  sudo timedatectl set-ntp true; timedatectl timesync-status
error no-certificates: there are no certificates yet: {ca} does not exist
  the topology says `security: mtls`, and without certificates every connection is refused
  isthmus certs init TOPOLOGY; where they were made on another machine, copy its folder here
error certificate-missing: {error}
  without it the others refuse every connection
  isthmus certs issue {name}, where the authority is
error certificate-unusable: {error}
  without it the others refuse every connection
  isthmus certs renew {name}, where the authority is
error device-wrong: {device} {index}: {problem}
  what it computes goes into the parameters of all sites
  keep its node out: drain it, then reset or replace the device
note device-right: {device} {index}: {products} products of matrices had the same bits in {for_}; \
copies to it and back reach {rate}
  a rank may run there
  nothing
warning certificate-ends: {cert}: ends in {days} days
  without it the others refuse every connection
  isthmus certs renew {name}, where the authority is
"""


class _Kind(NamedTuple):
    severity: Severity
    found: str
    why: str
    cure: str


def _kinds() -> dict[str, _Kind]:
    lines = iter(_TABLE.splitlines())
    rows = [(*head.split(maxsplit=2), next(lines).strip(), next(lines).strip()) for head in lines]
    return {name[:-1]: _Kind(Severity(severity), *texts) for severity, name, *texts in rows}


KINDS = _kinds()
"""The rows, by their names in the table."""


def finding(name: str, site: str | None = None, /, **facts: object) -> Finding:
    """Return a finding: the row of that name, with `facts` in the places that it has for them."""
    severity, *texts = KINDS[name]
    code = name.partition("/")[0]
    code, found, why, cure = (text.format_map(facts) for text in (code, *texts))
    return Finding(severity=severity, kind=code, site=site, found=found, why=why, cure=cure)
