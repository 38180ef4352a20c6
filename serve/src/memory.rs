//! How much memory caches may take.

use std::fs;
use std::path::Path;

/// Of what is free, in quarters: the rest is for runs, requests and other programs.
const QUARTERS: usize = 3;

/// A number of bytes for messages, rounded down by a tenth at most.
pub(crate) fn words(bytes: usize) -> String {
    const MANY: usize = 10;
    match (bytes >> 10, bytes >> 20) {
        (_, mib) if mib >= MANY => format!("{mib} MiB"),
        (kib, _) if kib >= MANY => format!("{kib} KiB"),
        _ => format!("{bytes} bytes"),
    }
}

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

/// The least limit of the process's control groups, as containers and systemd set it, in either version.
fn of_groups(groups: &str, root: &Path) -> Option<usize> {
    let limits = groups.lines().filter_map(|line| {
        let (controllers, own) = line.split_once(':')?.1.split_once(":/")?;
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        let limit = |folder: &Path| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<usize>().ok();
        root.join(own).ancestors().take_while(|folder| folder.starts_with(&root)).filter_map(limit).min()
    });
    limits.min()
}

/// Bytes of the weights of the model that `path` means: its file, files beside it whose names begin with its own, as external data's do, and those
/// of a checkpoint that it links to.
pub(crate) fn weights(path: &Path) -> usize {
    let Ok(model) = moh_runtime::find_model(path) else { return 0 };
    let Some(name) = model.file_name() else { return 0 };
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let own = files.filter(|file| file.file_name().as_encoded_bytes().starts_with(name.as_encoded_bytes()));
    let own = own.filter_map(|file| Some(fs::metadata(file.path()).ok().filter(|data| data.is_file())?.len()));
    let linked = moh_runtime::links(&model).unwrap_or_default();
    let bytes: u64 = own.chain(linked.iter().map(|link| link.bytes)).sum();
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn few_bytes_are_not_told_as_none() {
        for (bytes, expected) in [
            (0, "0 bytes"),
            (10_239, "10239 bytes"),
            (655_360, "640 KiB"),
            (1_996_800, "1950 KiB"),
            (10 << 20, "10 MiB"),
        ] {
            assert_eq!(words(bytes), expected);
        }
    }

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
        fs::create_dir(root.path().join("memory")).unwrap();
        fs::write(root.path().join("memory/memory.limit_in_bytes"), "300\n").unwrap();
        assert_eq!(of_groups("7:cpu:/x\n1:hugetlb,memory:/a\n0::/a/b\n", root.path()), Some(300));
    }

    #[test]
    fn weights_are_found_where_exports_put_them() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, size: usize| fs::write(folder.path().join(name), vec![0; size]).unwrap();
        fs::create_dir(folder.path().join("onnx")).unwrap();
        for (name, size) in [("onnx/model.onnx", 3000), ("onnx/model.onnx_data", 50), ("onnx/model_q4.onnx", 900)] {
            put(name, size);
        }
        assert_eq!(weights(folder.path()), 3050);
        assert_eq!(weights(&folder.path().join("onnx/model_q4.onnx")), 900);
        // The file beside the folder, where both are there.
        for (name, size) in [("model.onnx", 10), ("model.onnx_data", 200), ("tokenizer.json", 7)] {
            put(name, size);
        }
        assert_eq!(weights(folder.path()), 210);
        assert_eq!(weights(&folder.path().join("nothing")), 0);
    }
}
