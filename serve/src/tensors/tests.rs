#![allow(clippy::unwrap_used)]
use super::*;
use std::sync::Arc;

/// Doubles rows of numbers; fails where one is negative, and remembers how many rows each run had.
struct Doubler(Vec<usize>);

impl Run for Doubler {
    fn run(&mut self, inputs: Vec<Tensor>, _: &[usize], _: &Interrupt) -> Result<Vec<Tensor>, Problem> {
        let x = inputs[0].as_slice::<f32>().unwrap();
        self.0.push(inputs[0].shape()[0]);
        if x.iter().any(|x| *x < 0.0) {
            return Err(Problem::failed("negative"));
        }
        Ok(vec![Tensor::new(inputs[0].shape(), x.iter().map(|x| 2.0 * x).collect()).unwrap()])
    }
}

type Reply = oneshot::Receiver<Result<Vec<Tensor>, Problem>>;

fn job(rows: usize, value: f32) -> (Job, Reply) {
    let (reply, answer) = oneshot::channel();
    let inputs = vec![Tensor::new([rows, 2], vec![value; rows * 2]).unwrap()];
    let (deadline, claim) = (Deadline::after(Duration::from_secs(60)), Claim::default());
    (Job { inputs, outputs: vec![0], deadline, reply, claim }, answer)
}

/// Answers of these requests, of so many rows and with that number in them, and the rows of each run.
fn served(requests: &[(usize, f32)], rows: usize) -> (Vec<Result<Vec<f32>, Problem>>, Vec<usize>) {
    let queue = Queue::new(99);
    let mut answers = Vec::new();
    for &(rows, value) in requests {
        let (job, answer) = job(rows, value);
        queue.push(job).unwrap();
        answers.push(answer);
    }
    queue.close();
    let mut model = Doubler(Vec::new());
    serve(&mut model, "m", &queue, Some(&Batching { rows }), Duration::ZERO, &Arc::new(Health::default()));
    let numbers = |tensors: Vec<Tensor>| tensors[0].as_slice::<f32>().unwrap().to_vec();
    let answers = answers.into_iter().map(|mut answer| answer.try_recv().unwrap().map(numbers)).collect();
    (answers, model.0)
}

#[test]
fn requests_share_a_run_up_to_its_rows() {
    let (answers, runs) = served(&[(1, 1.0), (2, 2.0), (3, 3.0), (1, 4.0)], 4);
    let expected: Vec<Result<Vec<f32>, Problem>> =
        vec![Ok(vec![2.0; 2]), Ok(vec![4.0; 4]), Ok(vec![6.0; 6]), Ok(vec![8.0; 2])];
    assert_eq!(answers, expected);
    // The last one fits beside the first two, the third does not.
    assert_eq!(runs, [4, 3]);
}

#[test]
fn requests_for_other_outputs_do_not_share_a_run() {
    let queue = Queue::new(9);
    let (first, _waits) = job(1, 1.0);
    let (second, _waits_too) = job(1, 2.0);
    queue.push(first).unwrap();
    queue.push(Job { outputs: vec![1], ..second }).unwrap();
    queue.close();
    let mut model = Doubler(Vec::new());
    serve(&mut model, "m", &queue, Some(&Batching { rows: 4 }), Duration::ZERO, &Arc::new(Health::default()));
    assert_eq!(model.0, [1, 1]);
}

#[test]
fn a_request_that_fails_harms_no_other() {
    let (answers, runs) = served(&[(1, 1.0), (1, -1.0), (1, 3.0)], 8);
    let failed = Err(Problem::failed("negative"));
    assert_eq!(answers, [Ok(vec![2.0; 2]), failed, Ok(vec![6.0; 2])]);
    assert_eq!(runs, [3, 1, 1, 1]);
}

#[test]
fn abandoned_requests_are_not_run() {
    let queue = Queue::new(9);
    let (mut late, answer) = job(1, 1.0);
    late.deadline = Deadline::after(Duration::ZERO);
    queue.push(late).unwrap();
    queue.push(job(1, 2.0).0).unwrap();
    queue.close();
    let mut model = Doubler(Vec::new());
    serve(&mut model, "m", &queue, None, Duration::ZERO, &Arc::new(Health::default()));
    assert!(model.0.is_empty());
    drop(answer);
}

/// A model whose runs go on until they are broken off; it tells that one begins.
struct Endless(std::sync::mpsc::Sender<()>);

impl Run for Endless {
    fn run(&mut self, _: Vec<Tensor>, _: &[usize], interrupt: &Interrupt) -> Result<Vec<Tensor>, Problem> {
        self.0.send(()).unwrap();
        while !interrupt.is_interrupted() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Problem::failed("broken off"))
    }
}

#[test]
fn a_run_that_nobody_waits_for_is_broken_off() {
    for sharing in [None, Some(Batching { rows: 2 })] {
        let queue = Queue::new(9);
        let mut waiting = Vec::new();
        for _ in 0..2 {
            let (waiter, claim) = Claim::new();
            let (job, answer) = job(1, 1.0);
            queue.push(Job { claim, ..job }).unwrap();
            waiting.push((waiter, answer));
        }
        queue.close();
        let (began, begins) = std::sync::mpsc::channel();
        let leaving = std::thread::spawn(move || {
            let of_a_run = if sharing.is_some() { 2 } else { 1 };
            let runs = begins.iter().map(|()| waiting.drain(..of_a_run).for_each(drop));
            runs.count()
        });
        serve(&mut Endless(began), "m", &queue, sharing.as_ref(), Duration::ZERO, &Arc::new(Health::default()));
        assert_eq!(leaving.join().unwrap(), if sharing.is_some() { 1 } else { 2 });
    }
}
