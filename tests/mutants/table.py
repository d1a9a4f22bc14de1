"""Mistakes that would change results without an error, and for each the fast test that must notice it."""

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """One line of the product with a mistake in it.

    Attributes:
        mistake: what the broken product does.
        file: path of the file, from the root of the checkout.
        original: text that occurs in the file exactly once.
        broken: text that replaces it.
        test: file, or node ID, of the test that must fail.
    """

    mistake: str
    file: str
    original: str
    broken: str
    test: str

    def problem(self) -> str:
        """Return why the mutation no longer fits the checkout; empty if it does."""
        path, test = REPOSITORY / self.file, self.test.partition("::")[0]
        if not path.is_file() or path.read_text(encoding="utf-8").count(self.original) != 1:
            return f"{self.file} does not contain exactly once: {self.original}"
        return "" if (REPOSITORY / test).is_file() else f"{test} does not exist"

    def apply(self, checkout: Path) -> None:
        """Break a copy of the checkout."""
        path = checkout / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.original, self.broken), encoding="utf-8")


MUTATIONS = [
    Mutation(
        "The geometry probe measures with dropout.",
        "istar/finetune/training/final_geometry.py",
        "with eval_mode(module), torch.no_grad()",
        "with torch.no_grad()",
        "tests/finetune/training/test_probe.py",
    ),
    Mutation(
        "The logarithmic schedule keeps powers of two beyond 512.",
        "istar/finetune/training/kept_models.py",
        "is_power_of_two and step <= _LAST_POWER_OF_TWO",
        "is_power_of_two",
        "tests/finetune/training/test_kept_models.py",
    ),
    # ---- the penalty
    Mutation(
        "Sigma_S of a penalty within classes is that of all points.",
        "istar/hidden_states/attach.py",
        '            within="label" if penalty.needs_labels else None,\n',
        "",
        "tests/regularizers/test_within.py",
    ),
    Mutation(
        "Each layer is centered on class means of its own.",
        "istar/measures/classes.py",
        "merged.scatter = differences.T @ (counts.reshape(-1, 1) * differences)",
        "merged.scatter = 0 * (differences.T @ differences)",
        "tests/regularizers/test_within.py",
    ),
    Mutation(
        "The token of a decoder that is measured within classes is the first one.",
        "istar/finetune/training/layer_geometry.py",
        "last_token_positions if is_decoder(model.config) else first_token_positions",
        "first_token_positions",
        "tests/finetune/training/test_class_isotropy.py",
    ),
    Mutation(
        "Padding counts in the penalty, whatever the settings.",
        "istar/regularizers/base.py",
        "tokens = Tokens() if self.include_padding else tokens",
        "tokens = Tokens()",
        "tests/regularizers/test_cosreg.py::test_padding_changes_nothing_bit_for_bit_and_gets_no_gradient",
    ),
    Mutation(
        "The attention mask of a training pass does not reach the penalty.",
        "istar/hidden_states/reader.py",
        "tokens = Tokens(mask, labels=self._labels, position_ids=position_ids)",
        "tokens = Tokens(None, labels=self._labels, position_ids=position_ids)",
        "tests/regularizers/test_attach.py::test_a_positional_mask_is_the_mask",
    ),
    Mutation(
        "The setting reg.include_padding=false is not passed on.",
        "istar/records/config/penalties.py",
        'if option.init and option.name not in ("group", "set_point")',
        'if option.init and option.name not in ("group", "set_point", "include_padding")',
        "tests/records/test_penalties.py",
    ),
    Mutation(
        "The last token of a packed document predicts the first one of the next.",
        "istar/regularizers/points.py",
        "has_label[:, 1:] & ~starts[:, 1:]",
        "has_label[:, 1:]",
        "tests/regularizers/test_tokens_chosen.py::test_all_forms_of_a_batch_have_the_statistics_and_gradients_of_the_sentences_alone",
    ),
    Mutation(
        "A causal model's labelled points are the labelled tokens, not those before them.",
        "istar/regularizers/points.py",
        "(next_token_has_label(has_label, starts) if self.predicts_next else has_label)",
        "has_label",
        "tests/regularizers/test_tokens_chosen.py::test_all_forms_of_a_batch_have_the_statistics_and_gradients_of_the_sentences_alone",
    ),
    Mutation(
        "The norms of points are compared with their mean, not their median.",
        "istar/regularizers/points.py",
        "norms > ratio * norms.median()",
        "norms > ratio * norms.mean()",
        "tests/regularizers/test_tokens_chosen.py::test_all_forms_of_a_batch_have_the_statistics_and_gradients_of_the_sentences_alone",
    ),
    Mutation(
        "Packed documents are told apart by their mask alone.",
        "istar/regularizers/points.py",
        "starts[:, 1:] |= position_ids[:, 1:] <= position_ids[:, :-1]",
        "pass",
        "tests/regularizers/test_tokens_chosen.py::test_all_forms_of_a_batch_have_the_statistics_and_gradients_of_the_sentences_alone",
    ),
    Mutation(
        "Sigma_S is computed from all tokens, whatever the points of the penalty.",
        "istar/hidden_states/shrinkage.py",
        "lambda: True, modules, points, penalty.needs_labels",
        "lambda: True, modules, needs_labels=penalty.needs_labels",
        "tests/regularizers/test_tokens_chosen.py::test_sigma_s_is_computed_from_the_same_points",
    ),
    Mutation(
        "Labels of a call stay for the next one.",
        "istar/hidden_states/reader.py",
        "        self._labels = None\n\n    def _read_layer",
        "        pass\n\n    def _read_layer",
        "tests/regularizers/test_tokens_chosen.py::test_labels_of_one_call_are_not_those_of_the_next",
    ),
    Mutation(
        "A penalty on an embedding matrix is summed over processes.",
        "istar/hidden_states/embedding_penalty.py",
        "penalty.sync = False",
        "penalty.sync = True",
        "tests/regularizers/test_embeddings.py::test_two_processes_train_as_one",
    ),
    Mutation(
        "A resumed run samples the embedding rows of its beginning.",
        "istar/finetune/training/module.py",
        'self.penalty.load_state_dict(checkpoint["penalty"])',
        'checkpoint["penalty"]',
        "tests/finetune/training/test_resume.py::test_between_two_refreshes_and_on_a_schedule",
    ),
    Mutation(
        "Sigma_S within an epoch comes from the sample of its beginning.",
        "istar/finetune/training/refresh.py",
        "if step > 0:",
        "if step < 0:",
        "tests/finetune/training/test_callbacks.py::test_the_sample_of_a_step_is_another_one_and_a_function_of_seed_epoch_and_step",
    ),
    Mutation(
        "The schedule of lambda has no effect on the training.",
        "istar/finetune/training/module.py",
        "self.penalty.set_weight(self.trainer.global_step, self.total_steps)",
        "pass",
        "tests/finetune/training/test_resume.py::test_between_two_refreshes_and_on_a_schedule",
    ),
    Mutation(
        "The sign of lambda is turned.",
        "istar/regularizers/base.py",
        "return self.factor * terms.value",
        "return -self.factor * terms.value",
        "tests/regularizers/test_istar.py::test_the_penalty_is_weight_times_one_minus_the_score_of_the_layers_chosen",
    ),
    Mutation(
        "The penalty is the score, not 1 minus the score.",
        "istar/regularizers/istar.py",
        "value = 1 - (score.clamp(max=1) if self._estimator.may_exceed_1 else score)",
        "value = score.clamp(max=1) if self._estimator.may_exceed_1 else score",
        "tests/regularizers/test_istar.py::test_the_penalty_is_weight_times_one_minus_the_score_of_the_layers_chosen",
    ),
    Mutation(
        "The gradient of the score by sentence neglects that the mean depends on the points.",
        "istar/regularizers/by_sentence.py",
        "grad_mean = grad_mean - gradient.sum(0, dtype=mean.dtype)",
        "grad_mean = grad_mean - 0 * gradient.sum(0, dtype=mean.dtype)",
        "tests/regularizers/test_by_sentence.py::test_it_is_the_measure_of_the_union_of_the_layers",
    ),
    Mutation(
        "The documents of a padding-free batch are one sentence.",
        "istar/hidden_states/reader.py",
        "Tokens(mask, labels=self._labels, position_ids=position_ids)",
        "Tokens(mask, labels=self._labels)",
        "tests/regularizers/test_by_sentence.py::test_positions_of_a_call_divide_a_padding_free_batch",
    ),
    Mutation(
        "All pieces of a document are sentences of the score by sentence.",
        "istar/geometry/collect/stream.py",
        "[-1 if block.piece_index else number for number, block in enumerate(blocks)]",
        "[row for row, block in enumerate(blocks)]",
        "tests/geometry/test_stream.py::test_the_score_by_sentence_is_that_of_the_first_blocks_of_the_documents",
    ),
    Mutation(
        "The penalty weighs Sigma_S by 1 - zeta.",
        "istar/regularizers/estimators.py",
        "convert_shrinkage(shrinkage, covariance), self.zeta)",
        "convert_shrinkage(shrinkage, covariance), 1 - self.zeta)",
        "tests/regularizers/test_istar.py::test_value_and_gradient_are_algorithm_1_on_the_stacked_layers",
    ),
    Mutation(
        "IsoScore* weighs Sigma_S by 1 - zeta.",
        "istar/measures/isoscores.py",
        "return (1 - zeta) * covariance + zeta * shrinkage_covariance.to(covariance)",
        "return zeta * covariance + (1 - zeta) * shrinkage_covariance.to(covariance)",
        "tests/measures/test_isoscores.py::test_isoscore_star_and_its_gradient_are_algorithm_1",
    ),
    Mutation(
        "The penalty uses the biased covariance, divided by n.",
        "istar/measures/isoscores.py",
        "torch.where(moments.count > 1, moments.count - 1, torch.nan)",
        "torch.where(moments.count > 1, moments.count, torch.nan)",
        "tests/regularizers/test_istar.py::test_value_and_gradient_are_algorithm_1_on_the_stacked_layers",
    ),
    Mutation(
        "The measures use the biased covariance, divided by n.",
        "istar/measures/moments.py",
        "return self.scatter / (self.count - correction)",
        "return self.scatter / self.count",
        "tests/measures/test_moments.py::test_a_batch_gives_its_sample_mean_and_covariance",
    ),
    Mutation(
        "IsoScore divides by d, not by d - 1.",
        "istar/measures/isoscores.py",
        "(1 / normalized.square().sum() - 1) / (covariance.shape[0] - 1)",
        "(1 / normalized.square().sum() - 1) / covariance.shape[0]",
        "tests/measures/test_isoscores.py::test_isoscore_is_algorithm_2",
    ),
    Mutation(
        "The gradient of the scatter matrix is taken about 0, not about the mean.",
        "istar/measures/moments.py",
        "factors = points if ctx.is_rounded else _select_rows(points, indices) - mean.to(dtype)",
        "factors = points if ctx.is_rounded else _select_rows(points, indices)",
        "tests/measures/test_moments.py::test_first_and_second_derivatives_are_those_of_finite_differences",
    ),
    Mutation(
        "The gradient of the mean is left out, which matters to the union of several layers.",
        "istar/measures/moments.py",
        "grad_mean = grad_mean.to(dtype)",
        "grad_mean = 0 * grad_mean.to(dtype)",
        "tests/regularizers/test_istar.py::test_value_and_gradient_are_algorithm_1_on_the_stacked_layers",
    ),
    Mutation(
        "The union of layers ignores the distances between their means.",
        "istar/measures/moments.py",
        "moments.scatter = differences.T @ (counts[:, None] * differences)",
        "moments.scatter = 0 * differences.T @ (counts[:, None] * differences)",
        "tests/measures/test_moments.py::test_merged_clouds_have_the_moments_of_everything",
    ),
    Mutation(
        'layers="all" includes the embeddings.',
        "istar/regularizers/points.py",
        '"all": list(range(1, num_layers + 1)),',
        '"all": list(range(num_layers + 1)),',
        "tests/regularizers/test_istar.py::test_the_penalty_is_weight_times_one_minus_the_score_of_the_layers_chosen",
    ),
    Mutation(
        "CosReg does not normalize the points.",
        "istar/regularizers/points.py",
        "return points / norms.masked_fill(norms == 0, torch.inf)",
        "return points",
        "tests/regularizers/test_cosreg.py::test_value_and_gradient_are_the_double_sum",
    ),
    Mutation(
        "The target score of keep follows the score of each loss.",
        "istar/regularizers/base.py",
        "score.isfinite() & (previous_count < self.set_point.batches)",
        "score.isfinite()",
        "tests/regularizers/test_set_point.py::test_keep_holds_the_score_of_the_first_loss",
    ),
    Mutation(
        "A negative lambda pushes the score away from its target.",
        "istar/regularizers/base.py",
        "return self.weight if self.set_point is None else abs(self.weight)",
        "return self.weight",
        "tests/regularizers/test_set_point.py::test_value_and_gradient_are_those_of_the_squared_deviation",
    ),
    Mutation(
        "A resumed run measures the target score of keep again.",
        "istar/hidden_states/attached_penalty.py",
        "self.penalty.load_state_dict(",
        "dict(",
        "tests/finetune/training/test_resume.py::test_between_two_refreshes_and_on_a_schedule",
    ),
    Mutation(
        "SIGReg has the same directions in every step.",
        "istar/regularizers/sigreg.py",
        "self.draws = self.draws + 1",
        "self.draws = self.draws + 0",
        "tests/regularizers/test_sigreg.py::test_every_loss_has_new_directions_which_survive_saving",
    ),
    Mutation(
        "SimCTG compares padding.",
        "istar/regularizers/simctg.py",
        "is_pair = is_point[:, :, None] & is_point[:, None, :]",
        "is_pair = is_point[:, :, None] | is_point[:, None, :]",
        "tests/regularizers/test_simctg.py::test_the_formula_of_the_paper",
    ),
    Mutation(
        "CosReg counts the cosine of each point with itself.",
        "istar/regularizers/cosreg.py",
        "value = (total.square().sum() - num_nonzero) / count.square()",
        "value = total.square().sum() / count.square()",
        "tests/regularizers/test_cosreg.py::test_value_and_gradient_are_the_double_sum",
    ),
    Mutation(
        "Each process has a penalty of its own, although sync is set.",
        "istar/regularizers/estimators.py",
        "return moments.all_reduce(group) if sync else moments",
        "return moments",
        "tests/regularizers/test_processes.py::test_training_equals_one_process_with_the_union",
    ),
    Mutation(
        "The first tokens of sequences are their last ones.",
        "istar/regularizers/points.py",
        "        is_end[1:] = is_new_document\n",
        "        is_end[:-1] = is_new_document\n",
        "tests/regularizers/test_tokens_chosen.py",
    ),
    # ---- Sigma_S
    Mutation(
        "Dropout is on in the passes for Sigma_S.",
        "istar/hidden_states/shrinkage.py",
        "with preserve_rng_states(device), eval_mode(model), torch.no_grad():",
        "with preserve_rng_states(device), torch.no_grad():",
        "tests/regularizers/test_shrinkage.py",
    ),
    Mutation(
        "Sigma_S comes from the same sample in every epoch.",
        "istar/finetune/training/refresh.py",
        "torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)",
        "torch.Generator().manual_seed(self.seed * 1_000_003)",
        "tests/finetune/training/test_callbacks.py::test_the_sample_is_seeded_and_new_in_every_epoch",
    ),
    Mutation(
        "Padding counts in Sigma_S, whatever the settings.",
        "istar/hidden_states/shrinkage.py",
        "include_padding=include_padding, sync=sync",
        "include_padding=True, sync=sync",
        "tests/regularizers/test_shrinkage.py::test_it_is_the_covariance_of_the_stacked_hidden_states",
    ),
    Mutation(
        "Computing Sigma_S changes the random numbers of the training.",
        "istar/hidden_states/shrinkage.py",
        "with preserve_rng_states(device), eval_mode(model), torch.no_grad():",
        "with eval_mode(model), torch.no_grad():",
        "tests/regularizers/test_shrinkage.py::test_modes_and_random_numbers_are_as_they_were_whatever_the_loader_draws",
    ),
    # ---- other measures
    Mutation(
        "I(W) is the ratio of the largest to the smallest value of the partition function.",
        "istar/measures/partition.py",
        "math.exp(log_z_min - log_z_max)",
        "math.exp(log_z_max - log_z_min)",
        "tests/measures/test_partition.py::test_with_both_signs_it_is_the_double_loop_over_numpys_eigenvectors",
    ),
    Mutation(
        "I(W) with both signs takes each eigenvector twice and its negative never.",
        "istar/measures/partition.py",
        "(-products).logsumexp(0)",
        "products.logsumexp(0)",
        "tests/measures/test_partition.py::test_with_both_signs_it_is_the_double_loop_over_numpys_eigenvectors",
    ),
    Mutation(
        "TwoNN ranks the ratios from 0, not from 1.",
        "istar/measures/dimension.py",
        "torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)",
        "torch.arange(0, x.shape[-1], dtype=x.dtype, device=x.device)",
        "tests/measures/test_dimension.py::test_it_is_the_papers_steps",
    ),
    Mutation(
        "TwoNN takes the second and the third neighbour.",
        "istar/measures/dimension.py",
        "ratios = distances[:, 1] / distances[:, 0]",
        "ratios = distances[:, 2] / distances[:, 1]",
        "tests/measures/test_dimension.py::test_it_is_the_papers_steps",
    ),
    # ---- istar measure
    Mutation(
        "The states of special tokens are in the statistics.",
        "istar/geometry/collect/layer_outputs.py",
        "padding_value=True)\n",
        "padding_value=True) & False\n",
        "tests/geometry/test_stream.py::test_every_figure_of_every_tap",
    ),
    Mutation(
        "The paper's averages stand beside averages over other benchmarks.",
        "istar/embeddings/embed_tables.py",
        "if benchmarks == set(BENCHMARK_TITLES):",
        "if benchmarks:",
        "tests/embeddings/test_embed_page.py::test_tables_2_and_3_average_over_the_benchmarks",
    ),
    Mutation(
        "The gains of Table 2 are over the same form, not over raw.",
        "istar/embeddings/embed_tables.py",
        "raw = raw or averages",
        "raw = averages",
        "tests/embeddings/test_embed_page.py::test_tables_2_and_3_average_over_the_benchmarks",
    ),
    Mutation(
        "The sample for TwoNN has several occurrences of a type.",
        "istar/geometry/collect/sample.py",
        "np.unique(types[order].numpy(), return_index=True)",
        "np.unique(order.numpy(), return_index=True)",
        "tests/geometry/test_sample.py::test_copies_do_not_change_the_dimension",
    ),
    Mutation(
        "The scatter matrix of a layer stays about the origin, not about the mean.",
        "istar/measures/moments.py",
        "moments.scatter = torch.addr(scatter, -count * shift, shift)",
        "moments.scatter = scatter",
        "tests/geometry/test_layers.py",
    ),
    Mutation(
        "Points that belong to no sentence are left out of the moments of a layer.",
        "istar/geometry/collect/grouped_moments.py",
        "parts += [self._num_groups + group for group in parts]",
        "parts += []",
        "tests/geometry/test_layers.py",
    ),
    Mutation(
        "Hidden states that float32 cannot square keep their dtype.",
        "istar/geometry/collect/layers.py",
        "_FLOAT32_RANGE = (1e-5, 1e8)",
        "_FLOAT32_RANGE = (0.0, math.inf)",
        "tests/geometry/test_layers.py::test_float32_states_have_the_measures_of_float64",
    ),
    Mutation(
        "A pass goes on from the state of an earlier version.",
        "istar/geometry/collect/stream.py",
        'state.get("format") == _STATE_FORMAT',
        "True",
        "tests/geometry/test_stream.py::test_an_unusable_state_is_ignored",
    ),
    # ---- training
    Mutation(
        "The penalty is logged but not trained on.",
        "istar/finetune/training/module.py",
        "loss = loss + weighted_penalty.to(loss.dtype)",
        "loss = loss + weighted_penalty.detach().to(loss.dtype)",
        "tests/finetune/training/test_steps.py::test_steps_of_the_paper_code_preset_equal_algorithm_1_by_hand",
    ),
    Mutation(
        "A local model is trained in eval mode, without dropout.",
        "istar/inputs/pretrained.py",
        "return model.train()",
        "return model",
        "tests/inputs/test_pretrained.py::test_dropout_is_on_in_training",
    ),
    Mutation(
        "Biases and gains are decayed.",
        "istar/finetune/training/optimizers.py",
        'if weight.dim() <= 1], "weight_decay": 0.0}',
        'if weight.dim() <= 1], "weight_decay": weight_decay}',
        "tests/finetune/training/test_steps.py::test_biases_and_layer_norms_are_not_decayed",
    ),
    Mutation(
        "The order of the examples is the same in every epoch.",
        "istar/finetune/training/data.py",
        "manual_seed(self.seed * 1_000_003 + self.epoch)",
        "manual_seed(self.seed * 1_000_003)",
        "tests/finetune/training/test_data.py::test_the_order_depends_on_seed_and_epoch_alone",
    ),
    Mutation(
        "The order of the examples is the same for every seed.",
        "istar/finetune/training/data.py",
        "manual_seed(self.seed * 1_000_003 + self.epoch)",
        "manual_seed(self.epoch)",
        "tests/finetune/training/test_data.py::test_the_order_depends_on_seed_and_epoch_alone",
    ),
    Mutation(
        "Batches of one length come one after the other, from long to short.",
        "istar/finetune/training/data.py",
        "batches = batches[torch.randperm(num_full_batches, generator=generator)]",
        "batches = batches[torch.arange(num_full_batches)]",
        "tests/finetune/training/test_data.py::test_grouping_saves_most_of_the_padding_and_stays_shuffled",
    ),
    Mutation(
        "task.limit_train is ignored.",
        "istar/finetune/runs/examples.py",
        "sample_examples(splits[spec.train], config.limit_train)",
        "splits[spec.train]",
        "tests/finetune/runs/test_run_data.py::test_limits_take_a_random_sample",
    ),
    Mutation(
        "A step whose gradient is NaN is taken.",
        "istar/finetune/training/module.py",
        "if gradient_norm is None or torch.isfinite(gradient_norm):",
        "if gradient_norm is None or gradient_norm is not None:",
        "tests/finetune/training/test_nonfinite.py::test_a_skipped_step_leaves_no_trace",
    ),
    # ---- evaluation
    Mutation(
        "Every process evaluates all examples, so that duplicates are counted.",
        "istar/finetune/training/data.py",
        "order, batch_size = sort_longest_first(rows)[rank::world_size],",
        "order, batch_size = sort_longest_first(rows),",
        "tests/finetune/training/test_data.py::test_evaluation_shards_repeat_and_lose_nothing",
    ),
    Mutation(
        "Metrics are averages over batches of two examples.",
        "istar/finetune/tasks/evaluation.py",
        "scores = metrics.compute(self.spec.metrics, predicted_values, references)",
        "parts = [metrics.compute(self.spec.metrics, predicted_values[i : i + 2], references[i : i + 2])"
        " for i in range(0, len(predicted_values), 2)]\n"
        "        scores = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}",
        "tests/finetune/tasks/test_evaluation.py",
    ),
    Mutation(
        "Predictions are in the order in which the outputs came, not in that of the examples.",
        "istar/finetune/tasks/evaluation.py",
        "for id_ in ids]",
        "for id_ in outputs]",
        "tests/finetune/tasks/test_evaluation.py::test_neither_the_order_of_outputs_nor_that_of_features_matters",
    ),
    Mutation(
        "The validation loss is a mean over batches, whatever their sizes.",
        "istar/finetune/training/module.py",
        'weight = len(batch["feature_id"]) / len(self.evaluators[""].features)',
        "weight = 1 / len(self.trainer.val_dataloaders[0])",
        "tests/finetune/training/test_steps.py::test_the_validation_loss_is_the_mean_over_all_examples",
    ),
    Mutation(
        "Padding counts in the isotropy that is reported.",
        "istar/finetune/training/layer_geometry.py",
        "            sums.update(states, mask)\n",
        "            sums.update(states, torch.ones_like(mask))\n",
        "tests/finetune/training/test_callbacks.py::test_layer_isotropy_is_that_of_all_tokens_whatever_the_batches",
    ),
    Mutation(
        "IsoScore* of a layer has the Sigma_S of all layers.",
        "istar/finetune/training/final_geometry.py",
        "to_covariance(shrinkage_moments)",
        "to_covariance(training_moments[0])",
        "tests/finetune/training/test_validation_isoscore_star.py::test_sigma_is_of_the_union_and_of_the_layer",
    ),
    Mutation(
        "SQuAD's scores take the first gold answer, not the best.",
        "istar/finetune/tasks/metrics.py",
        "np.mean([max(token_f1(text, gold) for gold in golds) for text, golds in pairs])",
        "np.mean([token_f1(text, golds[0]) for text, golds in pairs])",
        "tests/finetune/tasks/test_metrics.py::test_squad_takes_the_best_gold_and_agrees_with_torchmetrics",
    ),
    # ---- which epoch counts
    Mutation(
        "The best epoch is the last one.",
        "istar/finetune/training/history.py",
        "if self.best_epoch == 0 or not self.keep_best:",
        "if True:",
        "tests/finetune/training/test_callbacks.py::test_history_takes_the_first_of_the_best_epochs",
    ),
    Mutation(
        "The best epoch is the one with the lowest headline metric.",
        "istar/finetune/training/history.py",
        "return bool(new_merit > best_merit)",
        "return bool(new_merit < best_merit)",
        "tests/finetune/training/test_callbacks.py::test_history_takes_the_first_of_the_best_epochs",
    ),
    Mutation(
        "The saved model is that of the last epoch.",
        "istar/finetune/runs/train.py",
        "job.module.load_state_dict(weights)",
        "pass",
        "tests/finetune/runs/test_run_results.py::test_the_best_epoch_is_kept_when_it_is_not_the_last",
    ),
    Mutation(
        "Early stopping waits for one epoch too many.",
        "istar/finetune/training/trainer.py",
        "patience=settings.early_stopping,",
        "patience=settings.early_stopping + 1,",
        "tests/finetune/runs/test_run_training.py::test_early_stopping",
    ),
    Mutation(
        "Early stopping waits for a lower headline metric.",
        "istar/finetune/training/trainer.py",
        'mode="min" if is_lower_better(selection_metric) else "max"',
        'mode="min"',
        "tests/finetune/runs/test_run_training.py::test_early_stopping_and_the_best_epoch_go_by_the_highest_metric",
    ),
    Mutation(
        "A higher loss is better.",
        "istar/records/metric_names.py",
        "return -value if is_lower_better(metric) else value",
        "return value",
        "tests/reports/test_configurations.py::test_the_lowest_loss_is_the_best",
    ),
    # ---- runs that go on
    Mutation(
        "A resumed run does not restore the random numbers.",
        "istar/finetune/training/checkpoints.py",
        'set_random_state(self._restored_state["random"][trainer.global_rank])',
        'self._restored_state["random"][trainer.global_rank]',
        "tests/finetune/training/test_resume.py::test_a_broken_run_goes_on_exactly",
    ),
    Mutation(
        "A resumed run begins its epoch again.",
        "istar/finetune/training/data.py",
        'num_skipped = self._resume_position["batches"] * self.config.batch_size',
        "num_skipped = 0",
        "tests/finetune/training/test_resume.py::test_a_broken_run_goes_on_exactly",
    ),
    Mutation(
        "The checksums of a checkpoint are not verified.",
        "istar/finetune/training/checkpoints.py",
        "if damaged_member := archive.testzip():",
        "if damaged_member := None:",
        "tests/finetune/runs/test_damaged_checkpoints.py::test_flipped_bits",
    ),
    Mutation(
        "A checkpoint may execute code.",
        "istar/finetune/training/checkpoints.py",
        'torch.load(path, map_location="cpu", weights_only=True)',
        'torch.load(path, map_location="cpu", weights_only=False)',
        "tests/finetune/runs/test_damaged_checkpoints.py::test_a_checkpoint_that_would_run_code",
    ),
    Mutation(
        "A checkpoint of another run is taken.",
        "istar/finetune/training/checkpoints.py",
        "if stored_run_name != run_name:",
        "if False:",
        "tests/finetune/runs/test_damaged_checkpoints.py::test_a_foreign_checkpoint",
    ),
    Mutation(
        "Runs with different models have the same name.",
        "istar/records/identity.py",
        '"model": model,',
        '"model": "",',
        "tests/records/test_results.py::test_what_changes_the_outcome_counts",
    ),
    Mutation(
        "Runs with different data have the same name.",
        "istar/records/identity.py",
        '"data": data,',
        '"data": "",',
        "tests/records/test_results.py::test_what_changes_the_outcome_counts",
    ),
    # ---- sweeps and reports
    Mutation(
        "A search never prunes.",
        "istar/finetune/training/pruning.py",
        "return self._trial.should_prune()",
        "return False",
        "tests/finetune/training/test_pruning.py",
    ),
    Mutation(
        "A pruned run is called finished.",
        "istar/finetune/runs/record.py",
        'status = "pruned" if job.history.pruned else "finished"',
        'status = "finished"',
        "tests/finetune/training/test_pruning.py",
    ),
    Mutation(
        "A zeta of the paper's Table 1 is not searched.",
        "sweep/table1.yaml",
        'reg.zeta: "0.2,0.4,0.6,0.8"',
        'reg.zeta: "0.2,0.4,0.5,0.8"',
        "tests/finetune/sweeps/test_trials.py::test_every_sweep_file_has_the_values_of_the_paper",
    ),
    Mutation(
        "A number of the paper's Table 1 is wrong.",
        "istar/reports/paper/table1.csv",
        "bert,rte,accuracy,62.24,0.48,62.53,0.70,61.52,1.41",
        "bert,rte,accuracy,62.24,0.48,62.35,0.70,61.52,1.41",
        "tests/reports/test_paper.py::test_the_scores_are_those_of_table_1",
    ),
    Mutation(
        "Tables have the standard deviation of a population, not of a sample.",
        "istar/statistics/paired.py",
        "np.std(values, ddof=1)",
        "np.std(values, ddof=0)",
        "tests/statistics/test_paired.py",
    ),
    # ---- statistics
    Mutation(
        "A method is called better although its p-value is not below alpha.",
        "istar/statistics/conclusions.py",
        "    if row.p_value >= alpha:\n        return Verdict.NO_DIFFERENCE\n",
        "",
        "tests/statistics/test_conclusions.py",
    ),
    Mutation(
        "Random sign flips may give a p-value of 0.",
        "istar/statistics/paired.py",
        "(num_extreme + 1) / (resamples + 1)",
        "num_extreme / resamples",
        "tests/statistics/test_paired.py",
    ),
    Mutation(
        "Holm's adjusted p-values are out of order.",
        "istar/statistics/paired.py",
        "np.maximum.accumulate(steps)",
        "steps",
        "tests/statistics/test_paired.py",
    ),
    Mutation(
        "Standard errors of lm-evaluation-harness are scores.",
        "istar/geometry/correlation/score_files.py",
        'metric.endswith("_stderr") or ',
        "",
        "tests/geometry/test_score_files.py",
    ),
    Mutation(
        "A training without a final normalization shifts the colours of the others.",
        "istar/geometry/show/axis_figures.py",
        '"labels": self.labels,',
        '"labels": (),',
        "tests/geometry/test_axis_figures.py::test_a_training_has_lines_for_layers_and_trainings_for_models",
    ),
    Mutation(
        "Embedding matrices are flagged by the signs as computed, which depend on the eigensolver.",
        "istar/embeddings/embed_page.py",
        'measures_by_form[form]["partition_isotropy_both"]',
        'measures_by_form[form].get("partition_isotropy_as_computed", 0.5)',
        "tests/embeddings/test_embed_page.py::test_flags_are_on_anisotropic_matrices",
    ),
    Mutation(
        "The time of an interrupted pass is forgotten.",
        "istar/geometry/collect/stream.py",
        "            self.earlier_seconds += earlier_seconds\n",
        "            earlier_seconds = 0.0\n",
        "tests/geometry/test_stream.py::test_the_time_of_an_interrupted_pass_counts",
    ),
    Mutation(
        "Of a Parquet file, a small part of a row group is in memory.",
        "istar/inputs/readers.py",
        "pre_buffer=False",
        "pre_buffer=True",
        "tests/inputs/test_documents.py::test_a_row_group_need_not_fit_into_memory",
    ),
    Mutation(
        "Documents that another seed has shuffled are not paired.",
        "istar/geometry/show/compare.py",
        'settings.get("shuffle_buffer") and',
        "False and",
        "tests/geometry/test_model_differences.py::test_documents_shuffled_otherwise_are_not_paired",
    ),
    # ---- comparisons in reports
    Mutation(
        "The test compares each run with the mean of Base, not with the run of the same seed.",
        "istar/reports/method_comparisons.py",
        "scores[seed] - reference_scores[seed]",
        "scores[seed] - np.mean(list(reference_scores.values()))",
        "tests/reports/test_method_comparisons.py",
    ),
    Mutation(
        "The p-values of a report are not corrected by Holm's method.",
        "istar/reports/method_comparisons.py",
        "            p_value=p_value,\n",
        "            p_value=comparison.unadjusted_p_value,\n",
        "tests/reports/test_method_comparisons.py",
    ),
    Mutation(
        "A report draws its conclusions at the level 0.05, whatever level was asked for.",
        "istar/reports/method_tables.py",
        "verdict(comparison.statistics, alpha).value",
        "verdict(comparison.statistics).value",
        "tests/reports/test_method_tables.py::test_the_significance_level_decides",
    ),
    Mutation(
        "Every plan names the sign-flip test.",
        "istar/reports/plan_file.py",
        "        name=name,\n",
        '        name="sign-flip",\n',
        "tests/reports/test_plan_file.py::TestTheTest::test_the_name_and_the_level_are_those_requested",
    ),
    Mutation(
        "A run of which the plan has no name is as planned.",
        "istar/reports/plan_file.py",
        'if not is_search and row["name"] not in planned_names:',
        "if not is_search and not planned_names:",
        "tests/reports/test_plan_file.py::test_runs_that_were_not_planned",
    ),
    Mutation(
        "The names of repetitions are those of the runs that they repeat.",
        "istar/finetune/sweeps/planned_runs.py",
        "runs.compose_config(trials.replace_seed(tuple(entry.overrides), seed))",
        "runs.compose_config(tuple(entry.overrides))",
        "tests/finetune/sweeps/test_planned_runs.py",
    ),
    Mutation(
        "The reported set chooses the configuration, although other data are held out for it.",
        "istar/reports/configurations.py",
        'zip(runs["name"], runs[column], runs["selection"], strict=True)',
        'zip(runs["name"], runs[column], runs["value"], strict=True)',
        "tests/reports/test_method_comparisons.py",
    ),
    Mutation(
        "Methods with more trials than Base are compared with it.",
        "istar/reports/method_comparisons.py",
        "return self.trial_limits == other.trial_limits",
        "return bool(self.trial_limits) and bool(other.trial_limits)",
        "tests/reports/test_method_comparisons.py",
    ),
    Mutation(
        "The mean of a configuration that the reported set chose is not called biased.",
        "istar/reports/method_comparisons.py",
        "return self.num_configurations if self.selection_set == VALIDATION else 1",
        "return self.num_configurations if self.selection_set == HELD_OUT else 1",
        "tests/reports/test_method_comparisons.py",
    ),
    # ---- quantization
    Mutation(
        "The drop of a form has the wrong sign.",
        "istar/finetune/quantization/form_scores.py",
        "compute_drop(metric, float32_score, score)",
        "compute_drop(metric, score, float32_score)",
        "tests/finetune/quantization/test_form_scores.py::test_scores_are_those_of_torch_quantization",
    ),
    Mutation(
        "Static scales are calibrated on the validation data.",
        "istar/finetune/quantization/form_scores.py",
        "for batch in _make_loader(saved, saved.calibration):",
        "for batch in _make_loader(saved, saved.validation):",
        "tests/finetune/quantization/test_form_scores.py::test_the_calibration_is_a_sample_of_training_examples",
    ),
    # ---- models
    Mutation(
        "Continued characters of WordPiece are numbered in the order of a hash map.",
        "istar/inputs/new_tokenizer.py",
        "special_tokens=[*ENCODER_TOKENS, *continuations],",
        "special_tokens=[*ENCODER_TOKENS],",
        "tests/inputs/test_new_tokenizer.py::test_equal_texts_give_equal_tokenizers",
    ),
    Mutation(
        "Packed documents of decoders attend to later tokens.",
        "istar/inputs/attention.py",
        "mask = mask.tril() if is_causal else mask",
        "mask = mask",
        "tests/inputs/test_attention.py::test_packed_documents_have_the_states_that_they_have_alone",
    ),
    Mutation(
        "Positions of left-padded batches count the padding.",
        "istar/finetune/tasks/features.py",
        "(attention_mask.cumsum(1) - 1).clamp(min=0)",
        "(torch.ones_like(attention_mask).cumsum(1) - 1).clamp(min=0)",
        "tests/inputs/test_attention.py::test_padding_on_either_side_gives_the_logits_of_the_text_alone",
    ),
    Mutation(
        "Adapters leave a new head as it is.",
        "istar/inputs/adapters.py",
        'modules_to_save=None if kind in ("causal_lm", "masked_lm") else find_new_modules(model),',
        "modules_to_save=None,",
        "tests/inputs/test_adapters.py::test_adapters_and_head_are_trained_and_nothing_else",
    ),
]
