"""Quality of experience of a token stream: tokens read over time, relative to an expected stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Reading:
    """Reader who reads received tokens at up to `speed` tokens per second, and expects the first token after `ttft_s`.

    Tokens that arrive faster than they are read wait in a buffer, and count towards the QoE once they are read. Times
    are seconds from the arrival of the request.

    Source: Andes (arXiv:2404.16283): QoE = integral of the tokens read / integral of min(expected tokens, length of the
    answer).
    """

    speed: float
    ttft_s: float
    at_s: float = 0.0
    """Time at which tokens were last received."""
    num_tokens: int = 0
    """Number of tokens received."""
    num_read: float = 0.0
    area: float = 0.0
    """Integral of `num_read` so far, token seconds."""

    def receive(self, at_s: float, num_tokens: int) -> None:
        """Count tokens received at this time."""
        self.area += self._read(at_s - self.at_s, 0.0, 0.0)
        self.num_read = min(self.num_tokens, self.num_read + self.speed * (at_s - self.at_s))
        self.at_s = at_s
        self.num_tokens += num_tokens

    def area_after(self, seconds: float, delay_s: float, rate: float) -> float:
        """Return `area` as it will be `seconds` after `at_s`, in token seconds.

        It is assumed that no token arrives until `delay_s` after `at_s`, and then `rate` tokens per second.
        """
        return self.area + self._read(seconds, delay_s, rate)

    def expected_area(self, until_s: float, length: float = float("inf")) -> float:
        """Return the integral of min(speed * (t - ttft_s), length) over t from `ttft_s` to `until_s`, token seconds."""
        reading_s = max(until_s - self.ttft_s, 0.0)
        rising_s = min(reading_s, length / self.speed)
        rest = length * (reading_s - rising_s) if reading_s > rising_s else 0.0
        return self.speed * rising_s**2 / 2.0 + rest

    def qoe(self) -> float:
        """Return the quality of experience of an answer whose last token has been received; 1 is perfect."""
        expected = self.expected_area(self.at_s, self.num_tokens)
        return 1.0 if expected <= 0 else min(self.area / expected, 1.0)

    def _read(self, seconds: float, delay_s: float, rate: float) -> float:
        """Return the integral over time of the number of tokens read, from `at_s` until `seconds` later."""
        delay_s = min(delay_s, seconds)
        buffered = self.num_tokens - self.num_read
        area, read = self._drained(delay_s, self.num_read, buffered, 0.0)
        more, _ = self._drained(seconds - delay_s, read, self.num_tokens - read, rate)
        return area + more

    def _drained(self, seconds: float, read: float, buffered: float, rate: float) -> tuple[float, float]:
        """Return (integral over time of the number of tokens read, this number at the end) for a period in which tokens
        arrive at the constant `rate`.
        """
        inflow = min(rate, self.speed)
        full_s = seconds if inflow >= self.speed else min(seconds, buffered / (self.speed - inflow))
        rest_s = seconds - full_s
        area = read * seconds + self.speed * full_s**2 / 2.0
        area += self.speed * full_s * rest_s + inflow * rest_s**2 / 2.0
        return area, read + self.speed * full_s + inflow * rest_s
