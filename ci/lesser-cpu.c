/* Hides instruction sets of an x86-64 processor from a program and all of its libraries.
 *
 * Preloaded by ci/lesser-cpu.sh. The processor is told to fault on CPUID (Linux, arch_prctl(ARCH_SET_CPUID)); the handler runs the instruction
 * and clears what MOH_LESSER_CPU asks for: "avx512" hides AMX, "avxvnni" AVX-512, too, "avx2" AVX-VNNI, too. Threads inherit the setting; a program that is
 * executed sets it again. Nothing stops a program from using what it does not ask about. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

/* Intel SDM volume 2, CPUID: leaf 7. */
static const uint32_t AMX_EDX = BIT(22) | BIT(24) | BIT(25);                  /* AMX-BF16, AMX-TILE, AMX-INT8 */
static const uint32_t AVX512_EBX = BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31);
static const uint32_t AVX512_ECX = BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14);
static const uint32_t AVX512_EDX = BIT(2) | BIT(3) | BIT(8) | BIT(23);
static const uint32_t SUB1_EAX_AVX512 = BIT(5);                               /* AVX512-BF16 */
static const uint32_t SUB1_EAX_AMX = BIT(21);                                 /* AMX-FP16 */
static const uint32_t SUB1_EAX_AVXVNNI = BIT(4) | BIT(23);                    /* AVX-VNNI, AVX-IFMA */
static const uint32_t SUB1_EDX_AVXVNNI = BIT(4) | BIT(5) | BIT(10);           /* AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16 */
static int hides_avx512, hides_avxvnni;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    (void)info;
    if (code[0] != 0x0f || code[1] != 0xa2) {
        /* Another fault: it happens again, without us. */
        struct sigaction standard = {.sa_handler = SIG_DFL};
        sigaction(signal, &standard, NULL);
        return;
    }
    uint32_t leaf = (uint32_t)registers[REG_RAX], sub = (uint32_t)registers[REG_RCX];
    uint32_t a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(leaf), "2"(sub));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && sub == 0) {
        d &= ~AMX_EDX;
        if (hides_avx512) {
            b &= ~AVX512_EBX;
            c &= ~AVX512_ECX;
            d &= ~AVX512_EDX;
        }
    } else if (leaf == 7 && sub == 1) {
        a &= ~SUB1_EAX_AMX;
        if (hides_avx512)
            a &= ~SUB1_EAX_AVX512;
        if (hides_avxvnni) {
            a &= ~SUB1_EAX_AVXVNNI;
            d &= ~SUB1_EDX_AVXVNNI;
        }
    }
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
    const char *what = getenv("MOH_LESSER_CPU");
    if (!what)
        return;
    hides_avxvnni = strcmp(what, "avx2") == 0;
    hides_avx512 = hides_avxvnni || strcmp(what, "avxvnni") == 0;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (sigaction(SIGSEGV, &action, NULL) != 0 || syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) != 0) {
        perror("lesser-cpu: this kernel or processor cannot fault on CPUID");
        exit(2);
    }
}
