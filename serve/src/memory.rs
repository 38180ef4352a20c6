//! How much memory caches may take.

use std::fs;
use std::path::Path;

/// Of what is free, in quarters: the rest is for runs, requests and other programs.
const QUARTERS: usize = 3;

/// Bytes for the caches of all models, where nobody says how many: most of what is free beside `weights`. `None` where the system does not tell.
pub(crate) fn usual(weights: usize) -> Option<usize> {
    let free = available()?;
    // Weights are mapped files, so that a model may be larger than the memory.
    Some(free.saturating_sub(weights).max(free / 4) / 4 * QUARTERS)
}

/// Bytes of memory that this process can still have.
fn available() -> Option<usize> {
    let system = of_system(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group =
        fs::read_to_string("/proc/self/cgroup").ok().and_then(|groups| of_groups(&groups, Path::new("/sys/fs/cgroup")));
    Some(group.map_or(system, |group| group.min(system)))
}

/// What `/proc/meminfo` says.
fn of_system(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}

/// The least limit of the process's control groups, as containers and systemd set it.
fn of_groups(groups: &str, root: &Path) -> Option<usize> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limit = |folder: &Path| fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse::<usize>().ok();
    root.join(own).ancestors().take_while(|folder| folder.starts_with(root)).filter_map(limit).min()
}

/// Bytes of a model's files, `path` or what is in that folder.
pub(crate) fn weights(path: &Path) -> usize {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
    // An export's layouts have it in a folder below.
    let folders = [folder.to_owned(), folder.join("onnx"), folder.join("1")];
    let files = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let sizes = files.filter(|file| file.file_name().to_string_lossy().contains(".onnx")).filter_map(|file| {
        let size = file.metadata().ok().filter(|data| data.is_file())?.len();
        usize::try_from(size).ok()
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_systems_words_are_understood() {
        assert_eq!(of_system("MemTotal:  9 kB\nMemAvailable:   12345 kB\n"), Some(12345 << 10));
        assert_eq!(of_system("MemTotal:  9 kB\n"), None);
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("a/b");
        fs::create_dir_all(&own).unwrap();
        let groups = "1:name=x:/z\n0::/a/b\n";
        assert_eq!(of_groups(groups, root.path()), None);
        fs::write(own.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("a/memory.max"), "5000\n").unwrap();
        assert_eq!(of_groups(groups, root.path()), Some(5000));
        fs::write(own.join("memory.max"), "400\n").unwrap();
        assert_eq!(of_groups(groups, root.path()), Some(400));
        assert_eq!(of_groups("1:memory:/a\n", root.path()), None);
    }

    #[test]
    fn weights_are_found_where_exports_put_them() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("onnx")).unwrap();
        for (name, size) in
            [("model.onnx", 10), ("model.onnx_data", 200), ("tokenizer.json", 7), ("onnx/model.onnx", 3000)]
        {
            fs::write(folder.path().join(name), vec![0; size]).unwrap();
        }
        assert_eq!(weights(folder.path()), 3210);
        assert_eq!(weights(&folder.path().join("onnx/model.onnx")), 3000);
    }
}
