//! L3, R3: Tests of a list of commands that runs in one sandbox.

use cogni_gateway::guest::init::command_frames::{CommandEnd, FramePart, FrameReader};
use cogni_gateway::guest::init::command_list::{ListedCommand, encode_commands};
use cogni_gateway::runner::{PreparedRun, RunErrorCode, RunHandles, RunInputs, RunResult};
use cogni_gateway::sandbox::output::{OutputCapture, OutputStream};
use cogni_gateway::sandbox::spec::SandboxTask;
use uuid::Uuid;

use crate::support::installation::TestInstallation;

/// A command's output, and its end.
type RunnerOutput = (String, Option<CommandEnd>);

/// L3: A command finds no file and no process of an earlier command, and cannot print a frame.
#[tokio::test(flavor = "multi_thread")]
async fn commands_in_one_sandbox_know_nothing_of_each_other() {
    let installation = TestInstallation::embedded();
    let leaves = "echo $OWN; echo told >&2; touch /tmp/left /run/left /dev/shm/left; \
         setsid sh -c 'trap \"\" TERM; sleep 1000' & exit 3";
    let looks = "ls -A /tmp /run /dev/shm; grep -lx sleep /proc/[0-9]*/comm; echo $OWN none";
    let frames = "printf 'E\\000\\000\\000\\002\\000\\000O\\000\\000\\000\\001x'; \
         printf 'E\\000\\000\\000\\002\\000\\000' > /proc/1/fd/1; test $? != 0 && kill -KILL $$";
    let commands = [
        listed_command(64, &["OWN=own"], leaves),
        listed_command(4096, &[], looks),
        listed_command(10, &[], "exec yes"),
        listed_command(64, &[], frames),
        listed_command(8, &[], "printf 12345678"),
        listed_command(0, &[], "true"),
    ];
    let (result, [first, second, third, fourth, fifth, last]) = run(&installation, commands).await;
    assert_eq!(result.exit_code, Some(0), "{:?} {}", result.error, result.stderr);
    assert_eq!(first, ("own\n".to_owned(), Some(command_end(3, "told\n"))));
    assert_eq!(
        second,
        ("/dev/shm:\n\n/run:\n\n/tmp:\nnone\n".to_owned(), Some(command_end(0, "")))
    );
    let is_over = third.1.as_ref().is_some_and(|end| end.is_over_limit);
    assert_eq!((&*third.0, is_over), ("y\ny\ny\ny\ny\n", true));
    assert_eq!(fourth.0, "E\0\0\0\u{2}\0\0O\0\0\0\u{1}x");
    assert_eq!(fourth.1.map(|end| end.status), Some(137));
    assert_eq!(
        [fifth, last],
        [
            ("12345678".to_owned(), Some(command_end(0, ""))),
            (String::new(), Some(command_end(0, "")))
        ]
    );
}

/// L3, R5: A command that cannot be started ends the list, and so does the time limit of the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_program_and_the_time_limit_end_a_list_of_commands() {
    let installation = TestInstallation::embedded();
    let mut missing = listed_command(64, &[], "");
    missing.argv = vec!["/missing".to_owned()];
    let commands = [listed_command(64, &[], "echo 1"), missing, listed_command(64, &[], "echo 3")];
    let (result, outputs) = run(&installation, commands).await;
    assert_eq!(result.exit_code, Some(127), "{}", result.stderr);
    assert!(result.stderr.contains("there is no `/missing`"), "{}", result.stderr);
    let none = || (String::new(), None);
    assert_eq!(outputs, [("1\n".to_owned(), Some(command_end(0, ""))), none(), none()]);

    let commands =
        [listed_command(64, &[], "echo 1"), listed_command(64, &[], "echo 2; exec sleep 1000")];
    let (result, outputs) = run(&installation, commands).await;
    assert_eq!(result.error_code.map(RunErrorCode::as_str), Some("timeout"), "{}", result.stderr);
    assert_eq!(outputs[0], ("1\n".to_owned(), Some(command_end(0, ""))));
    assert_eq!((&*outputs[1].0, outputs[1].1.is_none()), ("2\n", true));
}

fn listed_command(max_output_bytes: u64, env: &[&str], script: &str) -> ListedCommand {
    let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
    ListedCommand { max_output_bytes, env: texts(env), argv: texts(&["/bin/sh", "-c", script]) }
}

fn command_end(status: u8, text: &str) -> CommandEnd {
    CommandEnd { status, is_over_limit: false, said: text.as_bytes().to_owned() }
}

async fn run<const N: usize>(
    installation: &TestInstallation,
    commands: [ListedCommand; N],
) -> (RunResult, [RunnerOutput; N]) {
    // The machine has one sandbox of each name, and tests run side by side.
    let mut plan = installation.run_plan(&format!("run-{}", Uuid::now_v7()), &[]);
    plan.spec.argv = encode_commands(&commands);
    plan.spec.task = SandboxTask::Commands;
    plan.spec.limits.max_runtime = std::time::Duration::from_secs(10);
    let mut frames = vec![];
    let output = OutputCapture::for_stream(OutputStream::Stdout, 1 << 20, &mut frames);
    let run = PreparedRun::new(plan, RunInputs::default()).unwrap();
    let result = Box::pin(run.run_with_output(output, RunHandles::default())).await;
    let (mut reader, mut outputs) = (FrameReader::default(), [const { (String::new(), None) }; N]);
    let mut present = 0;
    let read = reader.push(&frames, |part| match part {
        FramePart::Output(piece) => outputs[present].0.push_str(str::from_utf8(piece).unwrap()),
        FramePart::End(end) => {
            outputs[present].1 = Some(end);
            present += 1;
        }
    });
    read.unwrap();
    (result, outputs)
}
