"""Find stop strings in a text that arrives in pieces, in constant amortised time per character.

The automaton is Aho's and Corasick's ("Efficient string matching", 1975): a trie of the stop strings in which each node
links to its longest proper suffix that is also a node. So the search never goes back in the text after a mismatch,
whatever the number of stop strings and the length of the text held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

MAX_STOP_CHARACTERS = 1024
"""Maximum length of a stop string, in characters."""
MAX_ALL_STOP_CHARACTERS = 4096
"""Maximum total length of a request's stop strings, in characters."""


class StopAutomaton:
    """Aho-Corasick automaton of stop strings; immutable, so any number of searches can share it.

    Nodes are numbered, with 0 the root. A node represents a prefix of stop strings.
    """

    __slots__ = ("__weakref__", "beginnings", "depths", "edges", "fallbacks", "found", "held_nodes")

    def __init__(self, stops: Sequence[str]) -> None:
        self.beginnings = frozenset(stop[0] for stop in stops)
        self.edges: dict[tuple[int, str], int] = {}
        self.depths = [0]
        """Length of the prefix that each node represents."""
        self.fallbacks = [0]
        """Longest proper suffix of each node that is also a node."""
        self.found = [0]
        """Length of the longest stop string that each node ends with; 0: none."""
        self.held_nodes = [0]
        """For each node, its longest suffix (or itself) that is an incomplete prefix of a stop string."""
        children: list[list[tuple[str, int]]] = [[]]
        for stop in stops:
            node = 0
            for character in stop:
                following = self.edges.get((node, character))
                if following is None:
                    following = self.edges[node, character] = len(self.depths)
                    children[node].append((character, following))
                    children.append([])
                    self.depths.append(self.depths[node] + 1)
                    self.fallbacks.append(0)
                    self.found.append(0)
                    self.held_nodes.append(0)
                node = following
            self.found[node] = len(stop)
        nodes = deque(node for _, node in children[0])
        while nodes:
            node = nodes.popleft()
            if not self.found[node]:
                self.found[node] = self.found[self.fallbacks[node]]
            self.held_nodes[node] = node if children[node] else self.held_nodes[self.fallbacks[node]]
            for character, child in children[node]:
                self.fallbacks[child] = self.step(self.fallbacks[node], character)
                nodes.append(child)

    def step(self, node: int, character: str) -> int:
        """Return the node that is reached from `node` by one more character."""
        while True:
            following = self.edges.get((node, character))
            if following is not None:
                return following
            if not node:
                return 0
            node = self.fallbacks[node]


_automata: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of these strings. It is cached while a request with the same strings uses it."""
    found = _automata.get(stops)
    if found is None:
        found = _automata[stops] = StopAutomaton(stops)
    return found


class StopSearch:
    """Search for stop strings in one text; it holds back the end of the text if that may begin a stop string."""

    __slots__ = ("_automaton", "_has_searched", "_node", "held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = stop_automaton(stops)
        self._node = 0
        self._has_searched = False
        self.held = ""
        """End of the text so far that may be the beginning of a stop string."""

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """Add text.

        Return (text to show, stop string that ends the text or None). The text to show, which may begin with text that
        was held back earlier, can no longer belong to a stop string.

        With `may_stop`, the text ends before the stop string that begins first; if several begin at the same character,
        the shortest one counts. A stop string that was completed while `may_stop` was False counts if its text is still
        held back.
        """
        automaton, node = self._automaton, self._node
        if not node and automaton.beginnings.isdisjoint(text):
            return text, None
        text, num_held = self.held + text, len(self.held)
        if may_stop and not self._has_searched:
            self._has_searched = True
            # Before `may_stop`, stop strings in the held-back text did not count; now this text is searched again.
            node, num_held = 0, 0
        start, end, place = len(text), 0, num_held
        while place < len(text):
            node = automaton.step(node, text[place])
            place += 1
            length = automaton.found[node]
            if may_stop and length and place - length < start:
                start, end = place - length, place
        if end:
            self.held = ""
            return text[:start], text[start:end]
        self._node = automaton.held_nodes[node]
        keep = automaton.depths[self._node]
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None
