"""Trees and groups that a job gives: taken as they are, or refused at their place."""

import itertools

import pytest

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.documents.run_documents import check_pair
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.job import NamedTree, Reduction
from isthmus.topology.spec.reduction_plan import Tree
from isthmus.topology.text.yaml_document import read_with_overrides
from isthmus.topology.trees.tree_choice import plan_reduction
from tests.fakes.tree_worlds import job as tree_job
from tests.fakes.tree_worlds import world
from tests.topology.documents import JOB, TOPOLOGY, changed
from tests.topology.documents import told as told_alone

SKETCH = load_topology(TOPOLOGY, "tri.yaml")
"""oregon - virginia - ohio: a line."""
REDUCTION = "reduction: {tree: star, hub: virginia}"
GIVEN = """\
reduction:
  trees:
    - {root: virginia, parents: {oregon: virginia, ohio: virginia}}
    - root: ohio
      parents: {oregon: virginia, virginia: ohio}
      weight: 2
"""


def told(reduction: str, *overrides: str) -> list[str]:
    """Return the problems of a job with that reduction, from its line on."""
    text = changed(JOB, REDUCTION + "\n", reduction)
    try:
        job = load_job(text, "job.yaml", overrides)
        check_pair(job, SKETCH, read_with_overrides(text, "job.yaml", overrides))
    except ConfigError as error:
        return [
            f"{each.line - 4}:{each.column} {each.message} [{each.path}]" for each in error.problems
        ]
    return []


def test_given_trees_are_taken_as_they_are() -> None:
    assert told(GIVEN) == []
    job = load_job(changed(JOB, REDUCTION + "\n", GIVEN), "job.yaml")
    assert job.reduction == Reduction(
        trees=(
            NamedTree(root="virginia", parents={"oregon": "virginia", "ohio": "virginia"}),
            NamedTree(root="ohio", parents={"oregon": "virginia", "virginia": "ohio"}, weight=2),
        )
    )
    plan = plan_reduction(job, SKETCH)
    assert plan.trees == (Tree(1, {0: 1, 2: 1}, 1), Tree(2, {0: 1, 1: 2}, 2))
    assert plan.turns == (1, 0, 1)
    assert plan.why == "as the job gives them: 2 trees with roots at ohio 67%, virginia 33%"


def test_a_given_tree_may_have_another_way_down() -> None:
    # Of a line there is only one tree: the other way down is the same, and counts as none.
    same = changed(GIVEN, "weight: 2", "down: {virginia: ohio, oregon: virginia}")
    assert told(same) == []
    plan = plan_reduction(load_job(changed(JOB, REDUCTION + "\n", same), "job.yaml"), SKETCH)
    assert plan.trees[1] == Tree(2, {0: 1, 1: 2})
    links = itertools.permutations(range(3), 2)
    triangle = world(3, ((*link, 1e6, 0.01) for link in links))
    tree = NamedTree(root="s0", parents={"s1": "s0", "s2": "s1"}, down={"s1": "s2", "s2": "s0"})
    assert plan_reduction(tree_job(trees=(tree,)), triangle).trees == (
        Tree(0, {1: 0, 2: 1}, down={1: 2, 2: 0}),
    )


def test_sites_that_are_given_other_trees_do_not_exchange_anything() -> None:
    jobs = [
        load_job(changed(JOB, REDUCTION + "\n", text), "job.yaml")
        for text in (GIVEN, changed(GIVEN, "weight: 2", "weight: 3"), "reduction: {tree: ring}\n")
    ]
    assert len({config_hash(job, SKETCH) for job in jobs}) == 3


def test_given_groups_make_a_hierarchy() -> None:
    written = "reduction: {tree: hierarchy, groups: [[oregon, virginia], [ohio]]}\n"
    assert told(written) == []
    job = load_job(changed(JOB, REDUCTION + "\n", written), "job.yaml")
    assert plan_reduction(job, SKETCH).trees == (Tree(1, {0: 1, 2: 1}),)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "root: ohio",
            "root: ohoi",
            [
                "4:13 unknown site 'ohoi' (did you mean 'ohio'?) [reduction.trees.1.root]",
                "5:16 every site but the root has a parent: 'ohio' has none "
                "[reduction.trees.1.parents]",
            ],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: virgnia, virginia: ohio",
            [
                "5:25 unknown site 'virgnia' (did you mean 'virginia'?) "
                "[reduction.trees.1.parents.oregon]"
            ],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: virginia, virginia: ohio, ohia: ohio",
            [
                "5:57 unknown site 'ohia' (did you mean 'ohio'?) [reduction.trees.1.parents.ohia]",
            ],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: virginia",
            [
                "5:16 every site but the root has a parent: 'virginia' has none "
                "[reduction.trees.1.parents]"
            ],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: virginia, virginia: oregon, ohio: virginia",
            ["5:59 'ohio' is the root: it has no parent [reduction.trees.1.parents.ohio]"],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: virginia, virginia: oregon",
            [
                "5:25 'oregon' -> 'virginia' -> 'oregon' is a circle: it never gets to the root "
                "[reduction.trees.1.parents.oregon]"
            ],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: virginia, virginia: virginia",
            [
                "5:45 'virginia' -> 'virginia' is a circle: it never gets to the root "
                "[reduction.trees.1.parents.virginia]"
            ],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: ohio, virginia: ohio",
            [
                "5:25 no links both ways between 'oregon' and 'ohio' "
                "[reduction.trees.1.parents.oregon]"
            ],
        ),
        (
            "weight: 2",
            "down: {oregon: ohio, virginia: ohio}",
            ["6:22 no links both ways between 'oregon' and 'ohio' [reduction.trees.1.down.oregon]"],
        ),
        (
            "weight: 2",
            "down: {oregon: virginia, virginia: oregon}",
            [
                "6:22 'oregon' -> 'virginia' -> 'oregon' is a circle: it never gets to the root "
                "[reduction.trees.1.down.oregon]"
            ],
        ),
        (
            "weight: 2",
            "down: {oregon: virginia}",
            [
                "6:13 every site but the root has a parent: 'virginia' has none "
                "[reduction.trees.1.down]"
            ],
        ),
        ("weight: 2", "weight: 0", ["6:15 want at least 1, got 0 [reduction.trees.1.weight]"]),
        ("weight: 2", "weight: 101", ["6:15 want at most 100, got 101 [reduction.trees.1.weight]"]),
        (
            "weight: 2",
            "weight: 1.5",
            ["6:15 want a whole number, got 1.5 [reduction.trees.1.weight]"],
        ),
        (
            "weight: 2",
            "wieght: 2",
            ["6:7 unknown key 'wieght' (did you mean 'weight'?) [reduction.trees.1.wieght]"],
        ),
        (
            "oregon: virginia, virginia: ohio",
            "oregon: 7, virginia: ohio",
            ["5:25 want a text, got 7: write it in quotes [reduction.trees.1.parents.oregon]"],
        ),
        (
            "{oregon: virginia, virginia: ohio}",
            "{}",
            ["5:16 want at least 1 of them, got 0 [reduction.trees.1.parents]"],
        ),
        (
            "  trees:",
            "  tree: ring\n  trees:",
            ["4:5 has no use with tree: ring: the trees say it all [reduction.trees]"],
        ),
        (
            "  trees:",
            "  hub: ohio\n  trees:",
            ["4:5 has no use with hub: the trees say it all [reduction.trees]"],
        ),
    ],
)
def test_a_tree_that_is_none_is_refused_at_its_place(
    old: str, new: str, expected: list[str]
) -> None:
    assert told(changed(GIVEN, old, new)) == expected


def test_all_trees_are_looked_at() -> None:
    both = changed(GIVEN, "ohio: virginia}", "ohio: virgina}")
    both = changed(both, "virginia: ohio", "virginia: oregon")
    assert [line.split()[0] for line in told(both)] == ["3:58", "5:25"]
    assert told(GIVEN, "reduction.trees.1.root=iowa")[0].endswith("[reduction.trees.1.root]")


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (
            "reduction: {tree: hierarchy, groups: [[oregon, virgina], [ohio]]}\n",
            [
                "1:38 every site is in a group: 'virginia' is in none [reduction.groups]",
                "1:48 unknown site 'virgina' (did you mean 'virginia'?) [reduction.groups.0.1]",
            ],
        ),
        (
            "reduction: {tree: hierarchy, groups: [[oregon, ohio], [ohio, virginia]]}\n",
            ["1:56 'ohio' is in two groups [reduction.groups.1.0]"],
        ),
        (
            "reduction: {tree: hierarchy, groups: [[oregon, ohio], [virginia]]}\n",
            [
                "1:38 no members with links to their groups reach each other, of the groups "
                "[oregon, ohio], [virginia] [reduction.groups]"
            ],
        ),
        (
            "reduction: {tree: hierarchy, groups: [[oregon, ohio, virginia], []]}\n",
            ["1:65 want at least 1 of them, got 0 [reduction.groups.1]"],
        ),
        (
            "reduction: {groups: [[oregon, ohio, virginia]]}\n",
            ["1:21 has no use with tree: auto; want tree: hierarchy [reduction.groups]"],
        ),
        (
            "reduction: {tree: ring, hub: ohio}\n",
            ["1:30 has no use with tree: ring [reduction.hub]"],
        ),
        (
            "reduction: {tree: ring}\n",
            [
                "1:19 a ring goes round the sites in the topology's order; there are no links both "
                "ways between 'ohio' and 'oregon' [reduction.tree]"
            ],
        ),
    ],
)
def test_forms_that_do_not_fit_are_refused_at_their_place(
    reduction: str, expected: list[str]
) -> None:
    assert told(reduction) == expected


def test_a_job_by_itself_is_told_what_needs_no_topology() -> None:
    text = changed(JOB, REDUCTION, "reduction: {tree: ring, groups: [[a]]}")
    assert told_alone("job", text) == [
        "5:33 has no use with tree: ring; want tree: hierarchy [reduction.groups]"
    ]


def test_one_site_needs_no_trees() -> None:
    alone = load_topology(
        "version: 1\nname: t\nsites:\n"
        "  - {name: a, nodes: 1, accelerators_per_node: 1, accelerator: cpu}\n",
        "t.yaml",
    )
    text = changed(JOB, REDUCTION, "reduction: {trees: [{root: a, parents: {b: a}}]}")
    with pytest.raises(ConfigError, match="leave the trees out"):
        plan_reduction(load_job(text, "job.yaml"), alone)
