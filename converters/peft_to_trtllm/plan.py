"""From adapted modules to the rows of lora_weights. Pure: names, shapes and the config only.

For each module: its place in the model, its meaning in the base's family, its rank and scale by the config's rules, its
dimensions against the base; then one block per target module, gathered into rows.
"""

from __future__ import annotations

from typing import NamedTuple

from peft_to_trtllm.base import Base
from peft_to_trtllm.dims import SYMBOLS, Dimensions
from peft_to_trtllm.experts import Experts, experts_leaf
from peft_to_trtllm.families import CONV1D, Leaf, leaf_name
from peft_to_trtllm.fields import Settings
from peft_to_trtllm.keys import Place, Refused, parse_path
from peft_to_trtllm.modules import Adapted
from peft_to_trtllm.placing import meaning_of, place_fits
from peft_to_trtllm.report import Match, Report
from peft_to_trtllm.rows import Block, Factors, Plan, Row
from peft_to_trtllm.scale import Scale, ScaleRules
from peft_to_trtllm.split import split_leaf
from peft_to_trtllm.stored import stored_factors
from peft_to_trtllm.targeting import Targeting

MOE_MODULES = frozenset({"moe_h_to_4h", "moe_4h_to_h", "moe_gate"})


class Target(NamedTuple):
    """One block and the row it belongs to."""

    module: str
    layer: int
    d_in: int
    d_out: int
    block: Block
    adapted: Adapted


class Planner:
    """Plans one adapter; every problem goes into the report."""

    def __init__(self, settings: Settings, targeting: Targeting, base: Base | None, report: Report) -> None:
        self.settings = settings
        self.targeting = targeting
        self.base = base
        self.report = report
        self.problems = report.problems
        self.scales = ScaleRules(settings, report.problems)
        self.dims = Dimensions(base, report.problems)
        self._has_gate = False

    def plan(self, modules: list[Adapted]) -> Plan | None:
        """Rows for all modules, or None with the reasons in the report."""
        self._has_gate = any(adapted.path.endswith(".gate_proj") for adapted in modules)
        placed = [(adapted, place) for adapted in modules if (place := self._place(adapted))]
        wrapped = [adapted for adapted, place in placed if experts_leaf(".".join(place.leaf))]
        experts = Experts(wrapped, self.base, self.settings.peft_version, self.scales, self.problems)
        targets = [target for adapted, place in placed for target in self._targets(adapted, place, experts)]
        self._note_config(placed)
        if not targets and not self.problems:
            self.problems.add(
                "no-tensors", "the file", "not one tensor lands in the model", "an adapter that changes something"
            )
        rows = self._rows(targets)
        if self.problems:
            return None
        scales = {target.adapted.path: target.block.factors.scale for target in targets}
        return Plan(tuple(sorted(rows, key=lambda row: (row.layer, row.module_id))), scales)

    def _place(self, adapted: Adapted) -> Place | None:
        place = parse_path(adapted.path)
        if isinstance(place, Refused):
            self.problems.add(place.rule, adapted.a.name, place.found, place.wanted)
            return None
        return place if place_fits(place, adapted.a.name, self.base, self.problems) else None

    def _note_config(self, placed: list[tuple[Adapted, Place]]) -> None:
        """What the config says of modules that the file says otherwise."""
        for field_name, key in self.scales.unused():
            self.report.warnings.add(
                "patterns",
                f"adapter_config.json {field_name}",
                f"pattern {key!r} matches no module of the file",
                "PEFT passes over it silently too; check its spelling",
            )
        paths = [(adapted.path.replace(".base_layer", ""), place) for adapted, place in placed]
        for path, _ in paths:
            if not self.targeting.covers(path):
                self.report.warnings.add(
                    "targets",
                    path,
                    "not targeted by adapter_config.json; it is converted",
                    "PEFT would pass over these tensors: a config that covers the file, or a file without them",
                )
        base = self.base
        alike = base.layers_alike if base else not any("experts" in place.leaf for _, place in placed)
        self.targeting.note_absent(paths, base.layers if base else None, alike=alike)

    def _targets(self, adapted: Adapted, place: Place, experts: Experts) -> list[Target]:
        name = ".".join(place.leaf)
        if experts_leaf(name):
            return self._expert_targets(adapted, place, experts)
        meaning = meaning_of(name, adapted.a.name, self.base, self.problems, has_gate=self._has_gate)
        rule = self._scale(adapted) if meaning else None
        if meaning is None or rule is None:
            return []
        leaf, expert = meaning
        factors = stored_factors(
            adapted, rule.scale, self.settings, self.dims, leaf, place.layer, self._is_turned(adapted), self.problems
        )
        if factors is None or not self._rank_fits(factors, rule.rank, adapted):
            return []
        targets = self._split(adapted, place, leaf, factors, expert)
        if targets:
            self._note(place, factors, leaf.modules)
        return targets

    def _is_turned(self, adapted: Adapted) -> bool:
        """Whether PEFT adapted the transposed weight: target_parameters on a family that stores (in, out)."""
        return bool(self.base and self.base.model_type in CONV1D and self.targeting.parameters(adapted.path))

    def _scale(self, adapted: Adapted) -> Scale | None:
        """Rank and scale of a plain module; of one wrapped by target_parameters under `<module>.<parameter>`."""
        parameters = self.targeting.parameters(adapted.path)
        rules = [self.scales.of(f"{adapted.path}.{name}") for name in parameters] or [self.scales.of(adapted.path)]
        if len(set(rules)) == 1:
            return rules[0]
        self.problems.add(
            "target-parameters",
            adapted.a.name,
            f"target_parameters names {', '.join(parameters)} of this module, and the patterns scale them differently",
            "one parameter of the module in target_parameters, the one that was trained",
        )
        return None

    def _note(self, place: Place, factors: Factors, modules: tuple[str, ...], remark: str = "") -> None:
        leaf = leaf_name(".".join(place.leaf))
        match = Match(leaf, place.layer, factors.rank, factors.scale, modules, remark)
        self.report.matches.append(match)

    def _rank_fits(self, factors: Factors, wanted: int, adapted: Adapted) -> bool:
        if factors.rank == wanted:
            return True
        self.problems.add(
            "rank",
            adapted.a.name,
            f"the tensor has rank {factors.rank} (shape {list(adapted.a.shape)}), adapter_config.json gives {wanted}",
            "r and rank_pattern as they were in training: the scale is alpha / r, so a wrong r is a wrong scale",
        )
        return False

    def _split(self, adapted: Adapted, place: Place, leaf: Leaf, factors: Factors, expert: int | None) -> list[Target]:
        d_in, d_out = factors.d_in, factors.d_out
        targets = []
        pieces = split_leaf(leaf, place.layer, d_out, adapted.b.name, self.base, self.dims, self.problems)
        for piece in pieces:
            symbol_in, symbol_out = SYMBOLS[piece.module]
            layer, a, b = place.layer, adapted.a.name, adapted.b.name
            good = self.dims.check(symbol_in, layer, d_in, a, f"the input width of {piece.module}")
            good &= self.dims.check(symbol_out, layer, piece.num_out, b, f"the output width of {piece.module}")
            if good:
                block = Block(factors, piece.b_rows, expert=expert or 0)
                targets.append(Target(piece.module, layer, d_in, piece.num_out, block, adapted))
        return targets

    def _expert_targets(self, adapted: Adapted, place: Place, experts: Experts) -> list[Target]:
        targets = []
        for module, d_in, d_out, block in experts.place(adapted):
            symbol_in, symbol_out = SYMBOLS[module]
            good = self.dims.check(symbol_in, place.layer, d_in, adapted.a.name, f"the input width of {module}")
            good &= self.dims.check(symbol_out, place.layer, d_out, adapted.b.name, f"the output width of {module}")
            if good:
                targets.append(Target(module, place.layer, d_in, d_out, block, adapted))
        if targets:
            modules = tuple(dict.fromkeys(target.module for target in targets))
            self._note(place, targets[0].block.factors, modules, f"{targets[0].block.factors.num_experts} experts")
        return targets

    def _rows(self, targets: list[Target]) -> list[Row]:
        groups: dict[tuple[int, str], list[Target]] = {}
        for target in targets:
            groups.setdefault((target.layer, target.module), []).append(target)
        return [row for group in groups.values() if (row := self._row(group))]

    def _row(self, group: list[Target]) -> Row | None:
        first = group[0]
        experts = first.module in MOE_MODULES
        dora = next((target.adapted.magnitude for target in group if experts and target.adapted.magnitude), None)
        if dora:
            advice = "the row of an expert module has no place for a magnitude; train without use_dora, or merge"
            self.problems.add("dora", dora.name, "DoRA on an expert", advice)
            return None
        seen: dict[int, Target] = {}
        for target in group:
            other = seen.setdefault(target.block.expert, target)
            if other is not target:
                self.problems.add(
                    "two-keys",
                    target.adapted.a.name,
                    f"a second pair for {target.module} of layer {target.layer}, beside {other.adapted.a.name}",
                    "one pair of factors for each place",
                )
                return None
        num_experts = 1
        if experts:
            num_experts = self.dims.known("E", first.layer) or 0
            if max(seen) >= num_experts:
                self._experts_unknown(group, num_experts)
                return None
        return Row(
            module=first.module,
            layer=first.layer,
            rank=max(target.block.factors.rank for target in group),
            d_in=first.d_in,
            d_out=first.d_out,
            blocks=tuple(seen[expert].block for expert in sorted(seen)),
            path=first.adapted.path,
            num_experts=num_experts,
            magnitude=first.adapted.magnitude,
        )

    def _experts_unknown(self, group: list[Target], num_experts: int) -> None:
        where = max(group, key=lambda target: target.block.expert)
        if num_experts:
            found = f"expert {where.block.expert} of a base that has {num_experts}"
        else:
            found = "how many experts the base has is not known"
        self.problems.add(
            "experts", where.adapted.a.name, found, "the base's config.json with its number of experts (--base)"
        )
