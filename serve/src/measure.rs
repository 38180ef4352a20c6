//! What Prometheus is told.

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::sync::OnceLock;
use std::time::Duration;

const REQUESTS: &str = "moh_requests_total";
const SECONDS: &str = "moh_request_seconds";
const CONNECTIONS: &str = "moh_connections";
const QUEUE: &str = "moh_queue_requests";
const SLOTS: &str = "moh_slots_used";
const TOKENS: &str = "moh_tokens_total";
const FIRST: &str = "moh_first_token_seconds";
const BATCH: &str = "moh_batch_rows";
const RESTARTS: &str = "moh_restarts_total";

/// From 1 ms to 5 minutes.
const TIMES: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
const ROWS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// The process's measurements, which all of its servers share.
pub(crate) fn handle() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let builder = PrometheusBuilder::new();
        // Fails for no buckets only.
        let builder = builder.set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &TIMES);
        let builder =
            builder.and_then(|builder| builder.set_buckets_for_metric(Matcher::Full(BATCH.to_owned()), &ROWS));
        let recorder = builder.unwrap_or_else(|_| PrometheusBuilder::new()).build_recorder();
        let handle = recorder.handle();
        // A program that has measurements of its own keeps them; `/metrics` is empty then.
        let _ = metrics::set_global_recorder(recorder);
        describe();
        handle
    })
}

fn describe() {
    describe_counter!(REQUESTS, "Requests by path and status");
    describe_histogram!(SECONDS, Unit::Seconds, "From a request's arrival to the head of its response");
    describe_gauge!(CONNECTIONS, "Connections");
    describe_gauge!(QUEUE, "Requests that wait for a model");
    describe_gauge!(SLOTS, "Sequences of an instance of a language model");
    describe_counter!(TOKENS, "Tokens of prompts, and generated ones");
    describe_histogram!(FIRST, Unit::Seconds, "From a request's arrival to its first token");
    describe_histogram!(BATCH, "Rows of a batch of tensors, or of a step of sequences");
    describe_counter!(RESTARTS, "Times that a model's thread was started again after a panic");
}

/// A request and its response's head. `path` is the route, not what the client wrote.
pub(crate) fn request(path: &str, status: &str, time: Duration) {
    counter!(REQUESTS, "path" => path.to_owned(), "status" => status.to_owned()).increment(1);
    histogram!(SECONDS, "path" => path.to_owned()).record(time.as_secs_f64());
}

/// A connection, as long as this lives.
pub(crate) struct Connection(());

impl Connection {
    pub(crate) fn new() -> Connection {
        gauge!(CONNECTIONS).increment(1.0);
        Connection(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        gauge!(CONNECTIONS).decrement(1.0);
    }
}

/// Requests that wait for a model.
pub(crate) fn queue(model: &str, requests: usize) {
    gauge!(QUEUE, "model" => model.to_owned()).set(requests as f64);
}

/// Sequences of an instance.
pub(crate) fn slots(model: &str, instance: usize, used: usize) {
    gauge!(SLOTS, "model" => model.to_owned(), "instance" => instance.to_string()).set(used as f64);
}

/// Rows that were computed together.
pub(crate) fn batch(model: &str, rows: usize) {
    histogram!(BATCH, "model" => model.to_owned()).record(rows as f64);
}

/// A request's first token.
pub(crate) fn first_token(model: &str, time: Duration) {
    histogram!(FIRST, "model" => model.to_owned()).record(time.as_secs_f64());
}

/// Tokens that were read.
pub(crate) fn prompt_tokens(model: &str, tokens: usize) {
    counter!(TOKENS, "model" => model.to_owned(), "kind" => "prompt").increment(tokens as u64);
}

/// Tokens that were generated.
pub(crate) fn generated_tokens(model: &str, tokens: usize) {
    counter!(TOKENS, "model" => model.to_owned(), "kind" => "generated").increment(tokens as u64);
}

/// What is measured of a model before anything happens to it, so that its first change is seen as one.
pub(crate) fn model(model: &str) {
    counter!(RESTARTS, "model" => model.to_owned()).increment(0);
}

/// A thread that was started again.
pub(crate) fn restart(model: &str) {
    counter!(RESTARTS, "model" => model.to_owned()).increment(1);
}
