"""Keys of verl that we do not need, and those that have no counterpart here."""

from __future__ import annotations

from docklands.config.convert.base import drop, lack

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

UNNEEDED = (
    *drop("hydra's", "defaults defaults.* hydra.* *._target_"),
    *drop(
        "micro-batches are packed to a token budget", "*.*micro_batch_size* *.use_dynamic_bsz *.log_prob_* *.strategy"
    ),
    *drop("micro-batches are packed to a token budget", "*.ppo_max_token_len_per_gpu *.forward_max_token_len_per_gpu"),
    *drop("tensors are always packed", "*.use_remove_padding trainer.balance_batch"),
    *drop("the kernels floor picks fused kernels by device", "*.use_fused_kernels *.fused_kernel_options* *.use_liger"),
    *drop("nothing is compiled by default", "*.use_torch_compile *.entropy_from_logits_with_chunking"),
    *drop("logits are made in chunks: train.logprob_chunk_tokens", "*.entropy_checkpointing"),
    *drop("rollout.max_response_tokens and data.max_prompt_tokens say it", f"{R}.prompt_length {R}.response_length"),
    *drop(
        "the generation engine sizes itself: rollout.max_batch, rollout.kv_cache_tokens",
        f"""{R}.gpu_memory_utilization {R}.max_num_batched_tokens {R}.max_model_len {R}.enforce_eager
        {R}.free_cache_engine {R}.enable_chunked_prefill {R}.enable_prefix_caching {R}.cudagraph_capture_sizes
        {R}.disable_log_stats {R}.load_format {R}.layered_summon {R}.multi_stage_wake_up {R}.engine_kwargs*
        {R}.data_parallel_size {R}.do_sample {R}.calculate_log_probs {R}.val_kwargs.do_sample {R}.name {R}.mode
        {R}.agent.num_workers {R}.quantization {R}.skip_tokenizer_init""",
    ),
    *drop("every generator's log-probs are recorded", "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout"),
    *drop("the reference has the actor's layout; it exists when a KL term reads it", "actor_rollout_ref.ref.*"),
    *drop("the critic has the actor's layout and batches", "critic.*"),
    *drop("FSDP2 shards and prefetches without a switch", f"{A}.fsdp_config.* {A}.megatron.use_mbridge"),
    *drop("checkpoints hold everything", "*.checkpoint.* trainer.del_local_ckpt_after_load trainer.default_hdfs_dir"),
    *drop("`docklands train --resume` goes on", "trainer.resume_mode trainer.resume_from_path"),
    *drop("`docklands trace` and the dashboard", "*.profiler.* *.profiler global_profiler.* trainer.profile_steps"),
    *drop("samples are in samples/ of the run directory", "trainer.log_val_generations trainer.*_data_dir *.trace.*"),
    *drop("no remote code is run", "*.trust_remote_code *.external_lib *.use_shm"),
    *drop("rows carry their columns by name", "data.return_* data.reward_fn_key data.dataloader_num_workers"),
    *drop("held-out prompts keep their order", "data.validation_shuffle data.val_batch_size"),
    *drop("prompts are measured as they are read", "data.filter_overlong_prompts_workers"),
    *drop("Ray is found, or started", "ray_kwargs.* ray_init.* trainer.ray_wait_register_center_timeout"),
    *drop("one implementation", "trainer.use_legacy_worker_impl trainer.esi_redundant_time"),
    *drop("the reward is what is filtered by", "algorithm.filter_groups.metric"),
    *drop("the limit is rollout.max_response_tokens", "reward_model.reward_kwargs.max_resp_len *.overlong_buffer.log"),
    *drop("only read with skip_rollout", f"{R}.skip_dump_dir"),
    *drop("rewards run beside generation", "*.launch_reward_fn_async critic.rollout_n critic.enable"),
)

UNSUPPORTED = (
    *lack("write lora.rank, alpha and targets: docs/howto/lora.md", "*.lora_rank *.lora_adapter_path", 0),
    *lack("goes with lora.rank", "*.lora_alpha *.target_modules *.exclude_modules", 16, "all-linear"),
    *lack("write the template into the tokenizer", "*.custom_chat_template data.apply_chat_template_kwargs", {}),
    *lack("the network is config.json's", "*.override_config", {}),
    *lack("text only", "data.image_key data.video_key", "images", "videos"),
    *lack("write a jsonl file", "data.custom_cls.* data.sampler.* data.datagen.* data.use_shm", False),
    *lack("the trainer does not truncate, so samples may not", f"{R}.top_k {R}.top_p {R}.val_kwargs.top_k", -1, 1, 0),
    *lack("write an environment: env.name", f"{R}.multi_turn.enable {R}.agent.*", False),
    *lack("with multi_turn.enable", f"{R}.multi_turn.*", 1, 256, "middle", "strict", "hermes", False),
    *lack("samples end at their end", f"{R}.ignore_eos {R}.skip_rollout {R}.over_sample_rate", False, 0),
    *lack("algorithm.correction says how", "algorithm.rollout_correction.* algorithm.rollout_is*", False),
    *lack("not there", "algorithm.use_pf_ppo algorithm.pf_ppo.* algorithm.mask_truncated_samples", False, "pow", 2.0),
    *lack("only with its loss mode", f"{A}.policy_loss.*", 0.0002, 1.0, 5.0, 0.1),
    *lack("the order of a step's samples is fixed", f"{A}.shuffle", False),
    *lack("a cosine goes down once", "*.num_cycles", 0.5),
    *lack("said by the run's length", "*.total_training_steps", -1),
    *lack("write the reward model as a reward function", "reward_model.enable reward.reward_model.enable", False),
    *lack("write it as a reward function", "reward_model.reward_manager reward.reward_manager", "naive", "dapo"),
    *lack("rewards that run code: `isolate: true`", "*.sandbox_fusion.*", 64, 1024),
    *lack("`docklands eval RUN_DIR`", "trainer.val_only", False),
    *lack("ours keeps both alike: checkpoint.keep", "trainer.max_critic_ckpt_to_keep"),
    *lack("set layout.vpp", f"{A}.megatron.virtual_pipeline_model_parallel_size"),
    *lack("ours has its own", f"{A}.megatron.*", False, True, 42, {}),
    *lack("only for a reward model", "reward_model.* reward.*"),
)
