//! The heads of a LLaMA's layers.

use crate::checkpoint::Config;
use crate::heads::{HeadCounts, HeadSet};
use crate::ops::Result;

/// The heads of every layer: `num_heads`, in `groups` that share a key/value head each.
pub(super) fn head_sets(
    config: &Config,
    family: &str,
    (num_heads, groups): (usize, usize),
    layers: usize,
) -> Result<Vec<HeadSet>> {
    let routing = ["shared_head", "routed_head", "shared_heads"];
    if family != "gqe-llama" {
        let grouped = format!("no such key in a `{family}`: heads are chosen in each group in family gqe-llama");
        config.refuse(&["group_top_k", "group_shared_heads"], &grouped)?;
    }
    match family {
        "llama" => {
            let routed = "no such key in a dense `llama`: routed models are of family moh-llama, moh-llm or gqe-llama";
            config.refuse(&routing, routed)?;
            return Ok(vec![HeadSet::first(HeadCounts::dense(num_heads)); layers]);
        }
        "gqe-llama" => {
            config.refuse(&routing, "no such key in a `gqe-llama`, which has group_top_k and group_shared_heads")?;
            return grouped(config, (num_heads, groups), layers);
        }
        "switchhead" => {
            config.refuse(&routing, "no such key in a `switchhead`, whose heads are all on")?;
            return Ok(vec![HeadSet::first(HeadCounts::dense(num_heads)); layers]);
        }
        _ => {}
    }
    if let Some(sets) = HeadSet::configured(config, &vec![num_heads; layers], "routed_head")? {
        return Ok(sets);
    }
    let counts: Vec<HeadCounts> = match family {
        "moh-llm" => {
            let shared = config.usize_or_list("shared_head", layers)?;
            let top_k = config.usize_or_list("routed_head", layers)?;
            let count = |i: usize| HeadCounts { num_heads, num_shared_heads: shared[i], top_k: top_k[i] };
            (0..layers).map(count).collect()
        }
        _ => {
            // Such models have no weights to show that they are others.
            let trained = "no such key in a `moh-llama`: a model with trained routers is of family moh-llm";
            config.refuse(&["shared_head", "routed_head"], trained)?;
            vec![fractions(config, num_heads)?; layers]
        }
    };
    for (i, count) in counts.iter().enumerate() {
        // Without weights a router may have nothing to choose.
        if family == "moh-llm" {
            count.check().map_err(|found| {
                config.rejects("shared_head, routed_head", "counts that make a router", format!("layer {i}: {found}"))
            })?;
        }
    }
    Ok(counts.into_iter().map(HeadSet::first).collect())
}

/// The first `group_shared_heads` of every group are shared; of its others, a token uses `group_top_k`.
fn grouped(config: &Config, (num_heads, groups): (usize, usize), layers: usize) -> Result<Vec<HeadSet>> {
    let (top_k, shared) = ("group_top_k", "group_shared_heads");
    config.note_default(shared, 0);
    let of_layer = config.usize_or_list(top_k, layers)?;
    let shared_of_layer = if config.has(shared) { config.usize_or_list(shared, layers)? } else { vec![0; layers] };
    let of_group = num_heads / groups;
    let set = |(i, (&top_k_, &shared_)): (usize, (&usize, &usize))| {
        let counts = HeadCounts { num_heads: of_group, num_shared_heads: shared_, top_k: top_k_ };
        counts.check().map_err(|found| {
            let expected = format!("counts that make a router for each group of {of_group} heads");
            config.rejects(&format!("{shared}, {top_k}"), expected, format!("layer {i}: {found}"))
        })?;
        let shared = (0..num_heads).filter(|head| head % of_group < shared_).collect();
        Ok(HeadSet::new(num_heads, shared, top_k_ * groups))
    };
    of_layer.iter().zip(&shared_of_layer).enumerate().map(set).collect()
}

fn fractions(config: &Config, num_heads: usize) -> Result<HeadCounts> {
    let share = |key: &str, default: f64| -> Result<usize> {
        let fraction = config.f64_or(key, default)?;
        if !(0.0..=1.0).contains(&fraction) {
            return Err(config.rejects(key, "a share of the heads, 0 to 1", fraction.to_string()));
        }
        Ok((num_heads as f64 * fraction) as usize)
    };
    let (shared, top_k) = (share("moh_shared_fraction", 0.5)?, share("moh_routed_fraction", 0.25)?);
    if shared + top_k > num_heads || shared + top_k == 0 {
        let expected = format!("with moh_shared_fraction 1 to {num_heads} active heads");
        return Err(config.rejects("moh_routed_fraction", expected, format!("{shared} + {top_k}")));
    }
    Ok(HeadCounts { num_heads, num_shared_heads: shared, top_k })
}
