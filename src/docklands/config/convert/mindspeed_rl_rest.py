"""Keys of MindSpeed RL that we do not need, and those that have no counterpart here."""

from __future__ import annotations

from docklands.config.convert.base import drop, lack

UNNEEDED = [
    *drop("names the file of the network, which ours reads from config.json", "defaults defaults.* actor_config.model"),
    *drop(
        "read from config.json in the model's directory",
        """actor_config.spec actor_config.num_layers actor_config.hidden_size actor_config.ffn_hidden_size
        actor_config.num_attention_heads actor_config.kv_channels actor_config.group_query_attention
        actor_config.num_query_groups actor_config.padded_vocab_size actor_config.make_vocab_size_divisible_by
        actor_config.add_qkv_bias actor_config.attention_bias actor_config.disable_bias_linear
        actor_config.position_embedding_type actor_config.rotary_base actor_config.rope_scaling_*
        actor_config.use_rotary_position_embeddings actor_config.low_freq_factor actor_config.high_freq_factor
        actor_config.original_max_position_embeddings actor_config.max_position_embeddings actor_config.beta_*
        actor_config.normalization actor_config.norm_epsilon actor_config.swiglu actor_config.qk_layernorm
        actor_config.untie_embeddings_and_output_weights actor_config.multi_latent_attention actor_config.qk_*
        actor_config.q_lora_rank actor_config.kv_lora_rank actor_config.v_head_dim actor_config.first_k_dense_replace
        actor_config.moe_layer_freq actor_config.moe_router_* actor_config.num_experts actor_config.n_shared_experts
        actor_config.moe_ffn_hidden_size actor_config.moe_intermediate_size actor_config.norm_topk_prob
        actor_config.vocab_extra_ids actor_config.vocab_size""",
    ),
    *drop(
        "the kernels floor picks fused kernels by device",
        """actor_config.use_flash_attn actor_config.use_fused_* actor_config.no_masked_softmax_fusion
        actor_config.attention_softmax_in_fp32 actor_config.no_gradient_accumulation_fusion
        actor_config.gemm_gradient_accumulation_fusion actor_config.no_bias_dropout_fusion actor_config.shape_order
        actor_config.moe_grouped_gemm actor_config.use_ascend_coc actor_config.coc_* actor_config.use_mc2
        actor_config.use_mcore_models""",
    ),
    *drop(
        "tensors are packed and communicated without a switch",
        """actor_config.variable_seq_lengths actor_config.reset_position_ids actor_config.reset_attention_mask
        actor_config.attention_mask_type actor_config.pad_to_multiple_of actor_config.tokenizer_padding_side
        actor_config.distributed_backend actor_config.no_shared_storage actor_config.overlap_grad_reduce
        actor_config.overlap_param_gather actor_config.ddp_bucket_size actor_config.accumulate_allreduce_grads_in_fp32
        actor_config.moe_permutation_async_comm actor_config.moe_alltoall_overlap_comm
        actor_config.moe_token_dispatcher_type actor_config.use_cp_send_recv_overlap
        actor_config.use_tp_pp_dp_mapping rl_config.use_remove_padding""",
    ),
    *drop(
        "micro-batches are packed to a token budget: train.tokens_per_microbatch",
        """actor_config.micro_batch_size critic_config.micro_batch_size rl_config.*_micro_batch_size
        actor_config.seq_length rl_config.use_dynamic_bsz rl_config.*_max_packing_token_size
        rl_config.use_dp_batch_balance""",
    ),
    *drop(
        "the dock hands out rows as they become ready: dock.groups_per_take",
        "rl_config.*_dispatch_size rl_config.blocking rl_config.integrated_mode_config",
    ),
    *drop("masters and moments are float32", "actor_config.initial_loss_scale actor_config.reuse_fp32_param"),
    *drop(
        "checkpoints are found and loaded whole; start from model.path, go on with `docklands train --resume`",
        """actor_config.load actor_config.finetune actor_config.no_load_* actor_config.no_save_* critic_config.load
        critic_config.save critic_config.finetune critic_config.no_load_* actor_config.pretrained_checkpoint
        actor_config.load_checkpoint_loosely""",
    ),
    *drop("data is read by rows", "actor_config.split actor_config.tokenizer_type actor_config.num_workers"),
    *drop("data is read by rows", "actor_config.dataloader_type actor_config.full_shuffle_instruction_dataset"),
    *drop("initialisation is the checkpoint's", "actor_config.init_method_std"),
    *drop("the critic has the actor's layout", "critic_config.*"),
    *drop(
        "the reference has the actor's layout and is kept by its ranks", "ref_config.* rl_config.reference_resource*"
    ),
    *drop("the critic shares the actor's devices", "rl_config.critic_resource*"),
    *drop("the stage says it: group_norm is grpo or dapo, gae is ppo", "rl_config.adv_estimator"),
    *drop("rewards are by rule here", "rl_config.rule_reward"),
    *drop(
        "said by algorithm.name", "rl_config.shuffle_mini_batch rl_config.shuffle_minibatch rl_config.advantage_whiten"
    ),
    *drop("the same as max_tokens", "rl_config.rollout_max_tokens"),
    *drop("the reward is what is filtered by", "rl_config.filter_groups_metric"),
    *drop("processes get threads by run.threads", "rl_config.num_cpus_for_* rl_config.runtime_env_path"),
    *drop("metrics are logged every step", "actor_config.log_interval actor_config.log_throughput rl_config.log_*"),
    *drop("`docklands trace` and the dashboard", "profiler_config profiler_config.* msprobe_config msprobe_config.*"),
    *drop("log-probs are always recorded, text is decoded once", "generate_config.sampling_config.logprobs"),
    *drop("log-probs are always recorded, text is decoded once", "generate_config.sampling_config.detokenize"),
    *drop("samples are keyed by run.seed", "generate_config.sampling_config.seed"),
    *drop("prompt + response tokens", "generate_config.max_model_len"),
    *drop(
        "the generation engine sizes itself: rollout.max_batch, rollout.kv_cache_tokens",
        """generate_config.gpu_memory_utilization generate_config.max_num_batched_tokens generate_config.enforce_eager
        generate_config.torchair_graph generate_config.enable_prefix_caching generate_config.enable_expert_parallel
        generate_config.num_scheduler_steps generate_config.enable_chunked_prefill generate_config.data_parallel_size
        generate_config.tokenizer_name_or_path generate_config.limit_mm_*""",
    ),
    *drop("no remote code is run", "generate_config.trust_remote_code"),
    *drop("wandb's own environment variable", "rl_config.wandb_save_dir"),
    *drop("only in DPO and reward training", "rl_config.beta actor_config.dpo_loss_type actor_config.ref_model"),
]

UNSUPPORTED = [
    *lack("layers are divided evenly over stages", "actor_config.num_layer_list actor_config.noop_layers"),
    *lack("set layout.vpp = layers / (pp x it)", "actor_config.num_layers_per_virtual_pipeline_stage"),
    *lack(
        "recomputation is of all layers: train.recompute none, selective or full",
        "actor_config.recompute_method actor_config.recompute_num_layers",
    ),
    *lack("no dropout in RL training", "actor_config.attention_dropout actor_config.hidden_dropout", 0.0),
    *lack("AdamW only", "actor_config.optimizer", "adam"),
    *lack("write the template into the tokenizer's chat_template", "actor_config.prompt_type*"),
    *lack("write lora.rank, alpha and targets: docs/howto/lora.md", "actor_config.lora_*", 0, False),
    *lack("text only", "actor_config.mm_model rl_config.is_multimodal vit_config.* rl_config.vit_*", False),
    *lack("PyTorch only", "actor_config.ai_framework"),
    *lack(
        "use held-out evaluation: eval.*", "actor_config.eval_interval actor_config.eval_iters actor_config.skip_train"
    ),
    *lack(
        "write the reward model as a reward function: reward.functions", "reward_config.* rl_config.reward_resource*"
    ),
    *lack(
        "write the episode as an environment: env.name", "rl_config.multi_turn* tool_config.* rl_config.async_*", False
    ),
    *lack("generation has no pipeline: raise infer tp", "generate_config.infer_pipeline_parallel_size", 1),
    *lack("the trainer does not truncate, so samples may not", "generate_config.sampling_config.top_p", 1),
    *lack("the trainer does not truncate, so samples may not", "generate_config.sampling_config.top_k", -1, 0),
    *lack("the trainer does not truncate, so samples may not", "generate_config.sampling_config.min_p", 0),
    *lack("deterministic as it is on CPU; set torch's own flags elsewhere", "actor_config.npu_deterministic", False),
]
