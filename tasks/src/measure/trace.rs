//! The profile that onnxruntime writes: events in the Trace Event Format, times in microseconds.

use crate::error::{Error, Result};
use serde::Deserialize;
use std::path::Path;
use std::time::Duration;

/// What the name of a node's event ends with.
const KERNEL_TIME: &str = "_kernel_time";

#[derive(Debug, Deserialize)]
struct Event {
    cat: String,
    name: String,
    ts: u64,
    dur: u64,
    #[serde(default)]
    args: Args,
}

#[derive(Debug, Default, Deserialize)]
struct Args {
    #[serde(default)]
    op_name: String,
}

/// One run of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeRun {
    pub(crate) name: String,
    pub(crate) op_type: String,
    pub(crate) time: Duration,
}

/// The nodes of every run of the model, in the order of the runs.
///
/// # Errors
/// [`Error::Read`] or [`Error::Malformed`].
pub(crate) fn read(path: &Path) -> Result<Vec<Vec<NodeRun>>> {
    let text = std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let malformed = |e| Error::malformed(path, "a profile of onnxruntime", e);
    let events: Vec<Event> = serde_json::from_slice::<Vec<Event>>(&text).map_err(malformed)?;
    let mut windows: Vec<(u64, u64)> = events
        .iter()
        .filter(|event| event.cat == "Session" && event.name == "model_run")
        .map(|event| (event.ts, event.ts + event.dur))
        .collect();
    windows.sort_unstable();
    let mut runs = vec![Vec::new(); windows.len()];
    for event in events {
        let Some(name) = event.name.strip_suffix(KERNEL_TIME).filter(|_| event.cat == "Node") else { continue };
        let after = windows.partition_point(|&(begin, _)| begin <= event.ts);
        if let Some(run) = after.checked_sub(1).filter(|&run| event.ts <= windows[run].1) {
            let (name, time) = (name.to_owned(), Duration::from_micros(event.dur));
            runs[run].push(NodeRun { name, op_type: event.args.op_name, time });
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn nodes_belong_to_the_run_that_they_fall_into() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let node = |name: &str, ts: u64, dur: u64| {
            format!(
                r#"{{"cat": "Node", "ph": "X", "name": "{name}", "ts": {ts}, "dur": {dur}, "args": {{"op_name": "Add"}}}}"#
            )
        };
        let run =
            |ts: u64| format!(r#"{{"cat": "Session", "name": "model_run", "ts": {ts}, "dur": 100, "args": {{}}}}"#);
        let events = [
            r#"{"cat": "Session", "name": "session_initialization", "ts": 1, "dur": 5}"#.to_owned(),
            node("a_kernel_time", 2, 1),
            node("a_kernel_time", 210, 7),
            node("b_fence_before", 215, 7),
            run(200),
            run(50),
            node("a_kernel_time", 60, 3),
            node("b_kernel_time", 70, 4),
        ];
        std::fs::write(file.path(), format!("[{}]", events.join(","))).unwrap();
        let of = |name: &str, us| NodeRun {
            name: name.to_owned(),
            op_type: "Add".to_owned(),
            time: Duration::from_micros(us),
        };
        assert_eq!(read(file.path()).unwrap(), [vec![of("a", 3), of("b", 4)], vec![of("a", 7)]]);
        std::fs::write(file.path(), "{").unwrap();
        assert!(matches!(read(file.path()), Err(Error::Malformed { .. })));
    }
}
