//! `moh-run serve`.

use super::number::{real, whole};
use super::runtime::RuntimeArgs;
use moh_serve::{Limits, ModelSpec};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

const MOST: usize = 1_000_000;
/// A GiB, in MiB: larger bodies are mistakes.
const MOST_MIB: usize = 1024;
/// A day.
const MOST_SECONDS: f64 = 86_400.0;

const EXAMPLES: &str = "\
Try it:
  moh-export CHECKPOINT -o llama/model.onnx --cache in-place
  moh-run serve llama digits=vit/model.onnx
  curl localhost:8000/v1/completions -d '{\"model\": \"llama\", \"prompt\": \"ROMEO:\", \"max_tokens\": 40}'
  curl localhost:8000/v2/models/digits

One port has everything:
  /v1/completions, /v1/chat/completions, /v1/models    OpenAI's API, with streaming; base URL http://localhost:8000/v1
  /v2/models/NAME/infer, /v2/models/NAME, /v2/health/  Open Inference Protocol, version 2, REST; gRPC on the same port
  /metrics, /openapi.json                              for Prometheus; all pages and their fields

A language model's requests share its steps if it was exported with --cache in-place; others generate one text at a time.
There is no TLS: put a proxy before it. docs/serve.md has unit and container files.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Models: an .onnx file, or the folder that holds model.onnx. Requests call a model by its folder's name, or by NAME.
    #[arg(required = true, value_name = "[NAME=]MODEL", value_parser = spec)]
    pub(crate) models: Vec<ModelSpec>,
    /// Address and port to listen on; 0.0.0.0:8000 is every address of this machine.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8000", value_parser = address)]
    pub(crate) listen: SocketAddr,
    /// A file with API keys, one a line: requests need one of them, as `Authorization: Bearer KEY`.
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Copies of each model, each with its own thread and memory. They share the processors.
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = whole(1, 64))]
    pub(crate) instances: usize,
    /// Sequences of a language model at a time, in each instance.
    #[arg(long, value_name = "N", default_value = "16", allow_negative_numbers = true, value_parser = whole(1, 1024))]
    slots: usize,
    /// Memory for the caches of all language models, in MiB: texts wait until there is room for them [default: three quarters of what is free
    /// beside the models].
    #[arg(long, value_name = "MIB", allow_negative_numbers = true, value_parser = whole(1, usize::MAX >> 20))]
    cache_memory: Option<usize>,
    /// Tokens of prompts that are read at a time, before the other sequences get their next token.
    #[arg(long, value_name = "N", default_value = "256", allow_negative_numbers = true, value_parser = whole(1, MOST))]
    prefill: usize,
    /// The most rows of a request on tensors, and of requests that share a run.
    #[arg(long, value_name = "N", default_value = "32", allow_negative_numbers = true, value_parser = whole(1, MOST))]
    batch: usize,
    /// How long tensors wait for others to share a batch with, in milliseconds.
    #[arg(long, value_name = "MS", default_value = "2", allow_negative_numbers = true,
        value_parser = real(0.0, 10_000.0))]
    batch_window: f64,
    /// Requests that wait for a model; more are refused with status 429.
    #[arg(long, value_name = "N", default_value = "256", allow_negative_numbers = true, value_parser = whole(1, MOST))]
    queue: usize,
    /// Body of a request, in MiB; a larger one is refused with status 413.
    #[arg(long, value_name = "MIB", default_value = "32", allow_negative_numbers = true,
        value_parser = whole(1, MOST_MIB))]
    max_body: usize,
    /// Seconds from a request's arrival to its end: 503 if it was not begun by then, else 504.
    #[arg(long, value_name = "S", default_value = "300", allow_negative_numbers = true,
        value_parser = real(0.001, MOST_SECONDS))]
    timeout: f64,
    /// Seconds that a client may take to send or read the next part.
    #[arg(long, value_name = "S", default_value = "60", allow_negative_numbers = true,
        value_parser = real(0.001, MOST_SECONDS))]
    stall: f64,
    /// Connections at a time.
    #[arg(long, value_name = "N", default_value = "1024", allow_negative_numbers = true, value_parser = whole(1, MOST))]
    connections: usize,
    /// Seconds that requests have to end after SIGTERM or SIGINT.
    #[arg(long, value_name = "S", default_value = "30", allow_negative_numbers = true,
        value_parser = real(0.0, MOST_SECONDS))]
    shutdown_timeout: f64,
    /// Write the log as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

impl ServeArgs {
    /// What requests may need.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            body: self.max_body << 20,
            queue: self.queue,
            slots: self.slots,
            cache: self.cache_memory.map(|mib| mib << 20),
            prefill: self.prefill,
            batch: self.batch,
            window: Duration::from_secs_f64(self.batch_window / 1e3),
            timeout: Duration::from_secs_f64(self.timeout),
            connections: self.connections,
            stall: Duration::from_secs_f64(self.stall),
            shutdown: Duration::from_secs_f64(self.shutdown_timeout),
        }
    }
}

/// An address by number or by name, such as localhost: of several the first, and rather one of IPv4.
fn address(text: &str) -> Result<SocketAddr, String> {
    let expected = || "expected an address and a port, such as 127.0.0.1:8000, localhost:8000 or [::]:8000".to_owned();
    if text.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(expected());
    }
    let found = text.to_socket_addrs().map_err(|e| format!("{e}; {}", expected()))?;
    found.min_by_key(SocketAddr::is_ipv6).ok_or_else(expected)
}

fn spec(text: &str) -> Result<ModelSpec, String> {
    ModelSpec::parse(text).map_err(|e| e.to_string())
}
