//! Compiles `kernels/*.cu` to GPU images. Register spills and serialised wgmma, which ptxas reports, are errors.
//!
//! Only with feature `kernels`. nvcc is taken from `MOH_NVCC`, `CUDA_HOME`, the PATH, or `target/cuda`, where
//! `ci/cuda-toolchain.sh` installs it. No GPU or driver is needed. `MOH_NVCC_FLAGS` are appended to its arguments.
//!
//! Each `NAME.cu` becomes `NAME.fatbin` and a static `NAME` in `modules.rs`. The resource usage that ptxas reports per
//! kernel is written to `resources.tsv`, which `ci/cuda-report.sh` prints.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

const ARGUMENTS: &[&str] = &["-std=c++17", "-O3", "--fatbin", "-Xfatbin=-compress-all", "-Xptxas=-v", "-Ikernels"];
/// Machine code for Ampere and Hopper, and PTX for later GPUs.
const PORTABLE: &[&str] = &[
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
];
/// wgmma and setmaxnreg exist only on Hopper.
const HOPPER: &[&str] = &["-gencode=arch=compute_90a,code=sm_90a"];

type Result<T> = std::result::Result<T, String>;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_KERNELS").is_none() {
        return;
    }
    if let Err(error) = compile_all() {
        for line in error.lines() {
            println!("cargo::error={line}");
        }
        std::process::exit(1);
    }
}

fn compile_all() -> Result<()> {
    for variable in ["MOH_NVCC", "MOH_NVCC_FLAGS", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    // The whole folder, because headers are included.
    println!("cargo:rerun-if-changed=kernels");
    let nvcc = find_nvcc()?;
    let toolkit = toolkit(&nvcc)?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    // Checks, tests and builds have separate output folders. Compiling takes minutes, so they share a cache in the
    // target folder, which is above PROFILE/build/CRATE/out.
    let cache = out.ancestors().nth(4).unwrap_or(&out).join("cuda-images");
    fs::create_dir_all(&cache).map_err(|e| format!("{}: {e}", cache.display()))?;
    let entries: Vec<fs::DirEntry> =
        fs::read_dir("kernels").map(|entries| entries.flatten().collect()).unwrap_or_default();
    let mut sources: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
    let flags = env::var("MOH_NVCC_FLAGS").unwrap_or_default();
    let compiler = Compiler { nvcc, toolkit, flags };
    sources.retain(|path| path.extension() == Some(OsStr::new("cu")));
    sources.sort();

    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).clamp(1, sources.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = compile(&compiler, source, &out, &cache);
                    results.lock().unwrap_or_else(|e| e.into_inner()).insert(source.clone(), result);
                }
            });
        }
    });
    let mut modules = format!(
        "/// The CUDA version of the compiler: 1000 * major + 10 * minor.\npub const TOOLKIT: i32 = {toolkit};\n"
    );
    let (mut table, mut errors) = (String::from(HEADER), String::new());
    for (source, result) in results.into_inner().unwrap_or_else(|e| e.into_inner()) {
        match result {
            Ok(kernels) => {
                let name = stem(&source);
                modules += &format!(
                    "#[doc = \"`kernels/{name}.cu`.\"]\npub static {}: Module = {{\n    const IMAGE: &Aligned<[u8]> = \
                     &Aligned(*include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\")));\n    \
                     Module {{ name: {name:?}, image: &IMAGE.0 }}\n}};\n",
                    name.to_uppercase()
                );
                kernels.iter().for_each(|kernel| table += &kernel.row(&name));
            }
            Err(error) => errors += &format!("{error}\n"),
        }
    }
    let names: Vec<String> = sources.iter().map(|source| format!("&{}", stem(source).to_uppercase())).collect();
    modules += &format!("/// Every module.\npub static ALL: &[&Module] = &[{}];\n", names.join(", "));
    write(&out.join("modules.rs"), &modules)?;
    write(&out.join("resources.tsv"), &table)?;
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

fn stem(source: &Path) -> String {
    source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

fn find_nvcc() -> Result<PathBuf> {
    if let Some(nvcc) = env::var_os("MOH_NVCC").filter(|nvcc| !nvcc.is_empty()) {
        let nvcc = PathBuf::from(nvcc);
        return if nvcc.is_file() { Ok(nvcc) } else { Err(format!("MOH_NVCC: there is no {}", nvcc.display())) };
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("no CARGO_MANIFEST_DIR")?).join("../..");
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = home.into_iter().chain(env::split_paths(&path)).chain([root.join("target/cuda/nvidia/cu13/bin")]);
    folders.map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file()).ok_or_else(|| {
        "feature kernels needs nvcc 12.4 or newer: run ci/cuda-toolchain.sh, or set MOH_NVCC or CUDA_HOME".to_owned()
    })
}

/// The inputs of an image besides its source; part of the cache key.
#[derive(Hash)]
struct Compiler {
    nvcc: PathBuf,
    toolkit: u32,
    flags: String,
}

/// The CUDA version of nvcc.
fn toolkit(nvcc: &Path) -> Result<u32> {
    let said = Command::new(nvcc).arg("--version").output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let version =
        said.split_once("release ").and_then(|(_, rest)| rest.split([',', '\n']).next()?.trim().split_once('.'));
    let number =
        version.and_then(|(major, minor)| Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10));
    match number {
        Some(number) if number >= 12040 => Ok(number),
        Some(_) => Err(format!("{}: expected CUDA 12.4 or newer, found {}", nvcc.display(), said.trim())),
        None => Err(format!("{}: --version says no CUDA release: {}", nvcc.display(), said.trim())),
    }
}

/// Compiles one file and checks the report of ptxas.
fn compile(compiler: &Compiler, source: &Path, out: &Path, cache: &Path) -> Result<Vec<Resources>> {
    let name = stem(source);
    let text = fs::read_to_string(source).map_err(|e| format!("{}: {e}", source.display()))?;
    let mut hasher = DefaultHasher::new();
    (ARGUMENTS, PORTABLE, HOPPER, compiler, with_headers(source)?).hash(&mut hasher);
    let known = cache.join(format!("{name}-{:016x}", hasher.finish()));
    let (image, report) = (known.with_extension("fatbin"), known.with_extension("txt"));
    let said = match fs::read_to_string(&report) {
        Ok(said) if image.is_file() => said,
        _ => {
            let said = run_nvcc(compiler, source, &name, &known)?;
            // Written last, as the sign that the image is complete; renamed into place, because other builds may write
            // it too.
            let temporary = known.with_extension(std::process::id().to_string());
            write(&temporary, &said)?;
            fs::rename(&temporary, &report).map_err(|e| format!("{}: {e}", report.display()))?;
            said
        }
    };
    let to = out.join(&name).with_extension("fatbin");
    fs::copy(&image, &to).map_err(|e| format!("{}: {e}", to.display()))?;
    // C7508, C7510 and their neighbours: setmaxnreg ignored, wgmma serialised.
    if let Some(line) = said.lines().find(|line| line.contains("(C75")) {
        return Err(format!("{}: {line}", source.display()));
    }
    let kernels = Resources::parse(&said);
    let limit = spill_limit(&text);
    match kernels.iter().find(|kernel| kernel.spills() > limit) {
        Some(kernel) => Err(format!(
            "{}: {} spills {} bytes on {}, more than {limit} (a line `// moh: spill-limit BYTES` in the file states the bound)",
            source.display(),
            kernel.name,
            kernel.spills(),
            kernel.target
        )),
        None => Ok(kernels),
    }
}

/// The contents of a file and of its includes, by name, without the emulator's headers.
fn with_headers(source: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let (mut texts, mut open) = (BTreeMap::new(), vec![source.to_owned()]);
    while let Some(path) = open.pop() {
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let included = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next());
        let included =
            included.filter(|name| !name.starts_with("emulator/")).map(|name| Path::new("kernels").join(name));
        let new: Vec<PathBuf> = included.filter(|path| !texts.contains_key(path)).collect();
        open.extend(new);
        texts.insert(path, text);
    }
    Ok(texts)
}

/// Writes `KNOWN.fatbin`; returns the output of nvcc.
fn run_nvcc(compiler: &Compiler, source: &Path, name: &str, known: &Path) -> Result<String> {
    let temporary = known.with_extension(format!("{}.fatbin", std::process::id()));
    let output = Command::new(&compiler.nvcc)
        .args(ARGUMENTS)
        .args(if name.ends_with("_sm90") { HOPPER } else { PORTABLE })
        .args(compiler.flags.split_whitespace())
        .arg(source)
        .arg("-o")
        .arg(&temporary)
        .output()
        .map_err(|e| format!("{}: {e}", compiler.nvcc.display()))?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let said: Vec<&str> =
            said.lines().filter(|line| !line.starts_with("ptxas info") && !line.starts_with(' ')).collect();
        return Err(format!("{}: nvcc failed\n{}", source.display(), said.join("\n")));
    }
    let image = known.with_extension("fatbin");
    fs::rename(&temporary, &image).map_err(|e| format!("{}: {e}", image.display()))?;
    Ok(said.into_owned())
}

/// Bytes that a file's kernels may spill: from its line `// moh: spill-limit BYTES`, else 0.
fn spill_limit(source: &str) -> u64 {
    let stated = source.lines().find_map(|line| line.trim().strip_prefix("// moh: spill-limit "));
    stated.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

const HEADER: &str = "module\tkernel\ttarget\tregisters\tshared\tstack\tspill_stores\tspill_loads\n";

/// Resources of a kernel on one target: 4-byte registers per thread, the rest in bytes.
#[derive(Default)]
struct Resources {
    name: String,
    target: String,
    registers: u64,
    shared: u64,
    stack: u64,
    stores: u64,
    loads: u64,
}

impl Resources {
    /// Parses the report of `ptxas -v`: per kernel, one line each with its name, its stack and its registers.
    fn parse(report: &str) -> Vec<Resources> {
        let mut kernels: Vec<Resources> = Vec::new();
        for line in report.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let mut quoted = rest.split('\'');
                let name = quoted.next().unwrap_or_default().to_owned();
                let target = quoted.nth(1).unwrap_or_default().to_owned();
                kernels.push(Resources { name, target, ..Resources::default() });
            } else if let Some(kernel) = kernels.last_mut() {
                if line.contains("bytes stack frame") {
                    kernel.stack = before(line, " bytes stack frame");
                    kernel.stores = before(line, " bytes spill stores");
                    kernel.loads = before(line, " bytes spill loads");
                } else if line.contains("Used ") {
                    kernel.registers = before(line, " registers");
                    kernel.shared = before(line, " bytes smem");
                }
            }
        }
        kernels
    }

    fn spills(&self) -> u64 {
        self.stores.max(self.loads)
    }

    fn row(&self, module: &str) -> String {
        let Resources { name, target, registers, shared, stack, stores, loads } = self;
        format!("{module}\t{name}\t{target}\t{registers}\t{shared}\t{stack}\t{stores}\t{loads}\n")
    }
}

/// The number before the text `words` in the line, or 0.
fn before(line: &str, words: &str) -> u64 {
    let number = line.split_once(words).and_then(|(left, _)| left.rsplit([' ', ',']).next()?.parse().ok());
    number.unwrap_or(0)
}
