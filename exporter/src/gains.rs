//! What published models gain: README's table.

use crate::error::Error;
use crate::inspect::{Lengths, inspect};
use crate::measured::{ms, rows};
use moh_models::Model;
use moh_models::presets::Preset;

/// The table in Markdown: what `inspect` counts, and measured times.
///
/// # Errors
/// A row whose preset cannot be inspected.
pub fn markdown() -> Result<String, Error> {
    let mut text = String::from(
        "| model | heads a token uses | MACs that routing saves | published code, exported with `torch.onnx` \
         | our export without the library | with it | with it / published |\n|---|--:|--:|--:|--:|--:|--:|\n",
    );
    for row in rows() {
        let (config, _) = Preset::named(&row.preset)?.complete()?;
        let (model, tensors) = Model::plan(&config, None)?;
        let inspection = inspect(&model, &tensors, Lengths { tokens: None, past: 0, source: None })?;
        text += &format!(
            "| {} | {:.0} % | {:.1} % | {} | {} | {} | **{:.2}** |\n",
            row.preset,
            100.0 * model.active_share(),
            100.0 * inspection.gain.macs_saved_share,
            ms(row.published_ms),
            ms(row.without_library_ms),
            ms(row.library_ms),
            row.library_ms / row.published_ms
        );
    }
    Ok(text)
}
